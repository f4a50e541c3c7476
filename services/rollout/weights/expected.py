"""The messages that a replica has to receive by a plan, and the comparison with those that it did receive.

A plan moves numbered messages. By the sharded path, and by deltas, they are the contents of the plan; by
gather-and-broadcast message n is tensor n of the manifest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millrace.contracts.v1 import weights_pb2
from millrace.errors import InvalidState, PublicationFailed
from millrace.weights.plans.gather_broadcast import gather_broadcast
from millrace.weights.plans.wire_layouts import Planner
from services.rollout.weights.transfer_request import TransferRequest
from services.rollout.weights.worker_methods import Checksums


@dataclass(frozen=True)
class ExpectedMessages:
    """The messages of one transfer that one replica's workers receive."""

    plan_hash: bytes
    sent: int
    """Messages of the whole plan; the sender gives the checksum of each."""
    numbers: Sequence[int]
    """Number of each message that each worker receives, for all workers, sorted."""
    bytes: int
    """Bytes that this replica receives."""
    tensors_of: Callable[[int], Sequence[str]]
    """Names of the tensors that a message has parts of."""

    def compare(self, received: Checksums, sent: Sequence[int], member_id: str) -> None:
        """Raises PublicationFailed if messages are missing, or differ from what was sent."""
        if len(sent) != self.sent or sorted(number for number, _ in received) != list(self.numbers):
            what = f"{member_id} got {len(received)} messages of {len(self.numbers)}, {len(sent)} checksums."
            raise PublicationFailed(what, "run the same release of millrace everywhere.")
        if wrong := [number for number, checksum in received if checksum != sent[number]]:
            names = list(dict.fromkeys(name for number in sorted(wrong) for name in self.tensors_of(number)))
            what = f"{len(wrong)} messages arrived at {member_id} changed, with parts of {', '.join(names[:5])}."
            raise PublicationFailed(what, "publish again; where it repeats, look at the network and the memory.")


def expected(request: TransferRequest, workers: int, planner: Planner) -> ExpectedMessages:
    """The messages for a replica of so many workers. Raises PublicationFailed if the layouts do not fit together,
    InvalidState for an unknown path."""
    if request.path in (weights_pb2.PATH_SHARDED, weights_pb2.PATH_DELTA):
        return _of_shards(request, workers, planner)
    if request.path == weights_pb2.PATH_GATHER_BROADCAST:
        return _of_broadcast(request, workers)
    raise InvalidState(f"this replica knows no path {request.path}.", "run the same release everywhere.")


def _of_shards(request: TransferRequest, workers: int, planner: Planner) -> ExpectedMessages:
    plan, tensors = planner.plan(request.manifest, request.layouts), request.manifest.tensors
    ranks = range(request.first_rank, request.first_rank + workers)
    return ExpectedMessages(
        plan_hash=plan.hash,
        sent=len(plan.sizes),
        numbers=sorted(number for rank in ranks for number in plan.contents_of(rank).tolist()),
        bytes=int(plan.ingress()[ranks.start : ranks.stop].sum()),
        tensors_of=lambda number: [tensors[i].name for i in plan.pieces.tensor[plan.pieces_in(number)].tolist()],
    )


def _of_broadcast(request: TransferRequest, workers: int) -> ExpectedMessages:
    tensors = request.manifest.tensors
    return ExpectedMessages(
        plan_hash=gather_broadcast(request.manifest, request.world_size).hash,
        sent=len(tensors),
        numbers=sorted([*range(len(tensors))] * workers),
        bytes=request.manifest.bytes,
        tensors_of=lambda number: [tensors[number].name],
    )

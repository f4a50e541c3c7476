"""The request for one transfer of weights: what comes or goes, by which path, where the ranks meet, until when. And the
messages that a replica has to receive for it, which are compared with those that it did receive.

A plan moves numbered messages. By the sharded path, and by deltas, they are the contents of the plan; by
gather-and-broadcast message n is tensor n of the manifest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from millrace.contracts.v1 import rollout_pb2, weights_pb2
from millrace.errors import InvalidState, PublicationFailed
from millrace.ids import Version
from millrace.weights.phases import PublicationId
from millrace.weights.plans.gather_broadcast import gather_broadcast
from millrace.weights.plans.manifest import Manifest
from millrace.weights.plans.wire_layouts import Planner
from services.rollout.weights.worker_methods import Checksums

PREPARE_AGAIN = "prepare it again with a new attempt."


def nothing_prepared() -> PublicationFailed:
    """The error for a phase whose transfer was aborted, or never prepared."""
    return PublicationFailed("the publication was aborted.", PREPARE_AGAIN)


@dataclass(frozen=True)
class KnownPlan:
    """What a member keeps of the plan that it agreed to last: later requests only give the plan's hash."""

    plan_hash: bytes
    manifest: Manifest
    layouts: weights_pb2.Sides


NO_PLAN = KnownPlan(b"", Manifest(()), weights_pb2.Sides())


@dataclass(frozen=True)
class TransferRequest:
    """One transfer as the ranks of a replica see it. A replica that receives and a replica that sends to a sibling
    both pass it to the workers of their engine."""

    key: str
    """Names the publication: job, version, epoch and attempt."""
    version: Version
    manifest: Manifest
    host: str
    port: int
    """Host and port are those of the store where the communicator's ranks meet."""
    world_size: int
    """Ranks of the communicator: all senders and every worker of every receiver."""
    first_rank: int
    """Rank of this replica's first worker in the communicator; its other workers follow. 0 if they send."""
    timeout_s: float
    """Limits the joining of the communicator and each operation after it."""
    path: "weights_pb2.Path"
    layouts: weights_pb2.Sides = field(default_factory=weights_pb2.Sides)
    """The boxes that each sender holds and each receiver wants; empty if the path does not use them."""
    communicator: str = ""
    """Names the communicator of a sharded transfer, which may live longer than the transfer."""
    already_joined: bool = False
    """All ranks are in that communicator from an earlier transfer."""
    leave_after: bool = False
    """All ranks leave that communicator when the transfer ends."""
    nccl_id: bytes = b""
    """NCCL's unique id; empty if the ranks meet over Gloo."""
    mode: "weights_pb2.CommitMode" = weights_pb2.COMMIT_MODE_UNSPECIFIED
    """How the version is put in place; unspecified: shadow if the memory allows it."""
    plan_hash: bytes = b""
    base: str = ""
    """Key of the publication that is in place here, and that changes may be sent against; empty: everything is sent."""

    @classmethod
    def from_proto(cls, request: rollout_pb2.PrepareReceiveRequest, known: KnownPlan) -> "TransferRequest | None":
        """None if the request only gives the hash of a plan, and `known` is another plan. Raises PublicationFailed
        if the manifest contradicts its own hash."""
        publication, rendezvous = PublicationId.from_proto(request.publication), request.rendezvous
        if request.HasField("manifest"):
            try:
                manifest = Manifest.from_proto(request.manifest)
            except ValueError as error:
                raise PublicationFailed(f"{error}.", "run the same release of millrace everywhere.") from error
            layouts = request.sides
        elif request.plan_hash and request.plan_hash == known.plan_hash:
            manifest, layouts = known.manifest, known.layouts
        else:
            return None
        return cls(
            key=publication.key,
            version=publication.version,
            manifest=manifest,
            host=rendezvous.host,
            port=rendezvous.port,
            world_size=rendezvous.world_size,
            first_rank=request.receiver.first_rank,
            timeout_s=request.deadline_s,
            path=request.path,
            layouts=layouts,
            communicator=rendezvous.key,
            already_joined=rendezvous.standing,
            leave_after=rendezvous.passing,
            nccl_id=rendezvous.nccl_id,
            mode=request.mode,
            plan_hash=request.plan_hash,
            base=PublicationId.from_proto(request.base).key if request.HasField("base") else "",
        )

    def encode(self, *, whole: bool = True) -> bytes:
        """The bytes for an engine's workers. Without `whole`, manifest and layouts are left out: the workers know the
        plan."""
        request = rollout_pb2.PrepareReceiveRequest(
            publication=_reference(self.key),
            manifest=self.manifest.to_proto() if whole else None,
            path=self.path,
            rendezvous=weights_pb2.Rendezvous(
                host=self.host,
                port=self.port,
                world_size=self.world_size,
                key=self.communicator,
                standing=self.already_joined,
                passing=self.leave_after,
                nccl_id=self.nccl_id,
            ),
            sides=self.layouts if whole else None,
            mode=self.mode,
            plan_hash=self.plan_hash,
            receiver=weights_pb2.Receiver(first_rank=self.first_rank),
            deadline_s=self.timeout_s,
            base=_reference(self.base) if self.base else None,
        )
        return request.SerializeToString()

    @classmethod
    def decode(cls, data: bytes, known: KnownPlan = NO_PLAN) -> "TransferRequest | None":
        """The request that `encode` wrote; None as `from_proto`."""
        return cls.from_proto(rollout_pb2.PrepareReceiveRequest.FromString(data), known)

    def aborted(self) -> PublicationFailed:
        """The error that waiters for this transfer get when it is aborted."""
        return PublicationFailed(f"publication {self.key} was aborted.", PREPARE_AGAIN)

    @property
    def known_plan(self) -> KnownPlan:
        return KnownPlan(self.plan_hash, self.manifest, self.layouts)


def _reference(key: str) -> weights_pb2.PublicationRef:
    """The publication that a key names."""
    job, version, epoch, attempt = key.rsplit("/", 3)
    return weights_pb2.PublicationRef(job_id=job, version=int(version), epoch=int(epoch), attempt=int(attempt))


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
    """The messages for a replica of this number of workers. Raises PublicationFailed if the layouts do not fit
    together, InvalidState for an unknown path."""
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

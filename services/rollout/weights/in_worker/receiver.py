"""The weight receiver inside one worker of an engine. It is the same for all engines.

vLLM and SGLang run it in their worker processes, behind `worker_rpc`; the Transformers engine runs it in its own
process. Methods are called in a thread during generation; those of BETWEEN_BATCHES, and any that is called while
generation is paused, by the thread that generates.
"""

import threading

from millrace.contracts.v1 import weights_pb2
from millrace.errors import PublicationFailed
from millrace.weights.plans.manifest import Manifest
from millrace.weights.plans.memory import Memory
from millrace.weights.transfer.channels.rendezvous import nccl_id
from millrace.weights.transfer.checksum import checksum
from millrace.wire.address import host_name
from services.rollout.weights.in_worker.delta import DeltaPath
from services.rollout.weights.in_worker.gather_broadcast import GatherBroadcastPath
from services.rollout.weights.in_worker.incoming import IncomingPath, IncomingTransfer
from services.rollout.weights.in_worker.model import LoadedPart, WorkerModel, part_of
from services.rollout.weights.in_worker.outgoing import OutgoingTransfer
from services.rollout.weights.in_worker.sharded import ShardedPath
from services.rollout.weights.in_worker.worker_layout import WorkerLayout
from services.rollout.weights.transfer_request import NO_PLAN, TransferRequest, nothing_prepared
from services.rollout.weights.worker_methods import Described, Placed, Prepared, Received, Sent

WAIT_S = 0.05
"""How long one call waits for the end of a transfer."""


class WeightReceiver:
    """Implements `WorkerMethods`, in whose order a publication calls it."""

    def __init__(self, model: WorkerModel) -> None:
        self._model = model
        self._layout = WorkerLayout(model)
        self._sharded = ShardedPath(model, self._layout)
        self._paths: dict[int, IncomingPath] = {
            weights_pb2.PATH_SHARDED: self._sharded,
            weights_pb2.PATH_DELTA: DeltaPath(self._sharded),
            weights_pb2.PATH_GATHER_BROADCAST: GatherBroadcastPath(model),
        }
        self._known_plan = NO_PLAN
        self._prepared: TransferRequest | None = None
        """Prepared, and not made ready yet."""
        self._incoming: IncomingTransfer | None = None
        self._written_part: LoadedPart = model
        """The part of the model that `_incoming` writes."""
        self._memory_to_send: Memory | None = None
        self._outgoing: OutgoingTransfer | None = None
        self._turn = threading.RLock()
        """Held by whatever begins, places or ends a transfer to this worker."""

    def describe(self, manifest: bytes) -> Described:
        """See `WorkerMethods`."""
        with self._turn:
            decoded = Manifest.from_proto(weights_pb2.Manifest.FromString(manifest))
            part_of(self._model, decoded.content).check(decoded)
            return Described(self._layout.boxes(decoded).encode(), self._layout.of(decoded).untaken)

    def host(self) -> str:
        """See `WorkerMethods`."""
        return host_name()

    def prepare(self, request: bytes) -> Prepared | None:
        """See `WorkerMethods`."""
        with self._turn:
            self.abort()
            if (decoded := TransferRequest.decode(request, self._known_plan)) is None:
                return None
            if not decoded.plan_hash or decoded.plan_hash != self._known_plan.plan_hash:
                part_of(self._model, decoded.manifest.content).check(decoded.manifest)
                self._known_plan = decoded.known_plan
            prepared = self._paths[decoded.path].prepare(decoded, self._rank_in(decoded))
            self._prepared = decoded
            return prepared

    def make_ready(self, shadow: bool) -> None:
        """See `WorkerMethods`."""
        with self._turn:
            request, self._prepared = self._prepared, None
            if request is None:
                raise nothing_prepared()
            self._incoming = self._paths[request.path].transfer(request, self._rank_in(request), shadow=shadow)
            self._written_part = part_of(self._model, request.manifest.content)

    def begin(self) -> None:
        """See `WorkerMethods`."""
        with self._turn:
            if self._incoming is None:
                raise nothing_prepared()
            self._incoming.begin()

    def wait_received(self) -> Received | None:
        """See `WorkerMethods`."""
        if (incoming := self._incoming) is None:
            raise nothing_prepared()
        return incoming.wait(WAIT_S)

    def place(self) -> Placed:
        """See `WorkerMethods`."""
        with self._turn:
            incoming, self._incoming = self._incoming, None
            if incoming is None:
                raise nothing_prepared()
            placed = incoming.place()
            self._written_part.update_derived()
            return placed

    def abort(self) -> None:
        """See `WorkerMethods`."""
        with self._turn:
            incoming, self._incoming, self._prepared = self._incoming, None, None
            if incoming is not None:
                incoming.close()

    def checksums(self) -> dict[str, int]:
        """See `WorkerMethods`."""
        return {name: checksum(parameter) for name, parameter in self._model.parameters.items()}

    def prepare_send(self, request: bytes, served: str) -> bytes:
        """See `WorkerMethods`."""
        with self._turn:
            self.end_send()
            rank = self._model.rank
            self._memory_to_send = self._layout.sender_memory(_whole(request), rank, served)
            return nccl_id(rank == 0 and self._memory_to_send.device.type == "cuda")

    def send(self, request: bytes) -> None:
        """See `WorkerMethods`."""
        memory, self._memory_to_send = self._memory_to_send, None
        if memory is None:
            raise _copy_ended()
        self._outgoing = OutgoingTransfer(_whole(request), self._model.rank, memory)
        self._outgoing.begin()

    def wait_sent(self) -> Sent | None:
        """See `WorkerMethods`."""
        if (outgoing := self._outgoing) is None:
            raise _copy_ended()
        return outgoing.wait(WAIT_S)

    def end_send(self) -> None:
        """See `WorkerMethods`."""
        outgoing, self._outgoing, self._memory_to_send = self._outgoing, None, None
        if outgoing is not None:
            outgoing.close()

    def finish_batch(self) -> None:
        """See `WorkerMethods`."""

    def close(self) -> None:
        """Ends every transfer, leaves the communicator and frees all memory."""
        self.abort()
        self.end_send()
        self._sharded.leave()

    def _rank_in(self, request: TransferRequest) -> int:
        """This worker's rank in the communicator."""
        return request.first_rank + self._model.rank


def _whole(request: bytes) -> TransferRequest:
    """A request to send, which always contains its plan."""
    decoded = TransferRequest.decode(request)
    assert decoded is not None
    return decoded


def _copy_ended() -> PublicationFailed:
    return PublicationFailed("the copy was ended.", "begin a new attempt.")

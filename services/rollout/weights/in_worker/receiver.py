"""The weight receiver inside one worker of an engine. It is the same for all engines.

vLLM and SGLang run it in their worker processes, behind `worker_rpc`; the Transformers engine runs it in its own
process. Methods are called in a thread during generation; those of BETWEEN_BATCHES, and any that is called while
generation is paused, by the thread that generates.
"""

import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from millrace.contracts.v1 import weights_pb2
from millrace.errors import PublicationFailed
from millrace.weights.plans.manifest import Manifest
from millrace.weights.plans.memory import Memory
from millrace.weights.plans.wire_layouts import Planner
from millrace.weights.transfer.channels.channel import Channel, MessageExchange
from millrace.weights.transfer.channels.rendezvous import nccl_id
from millrace.weights.transfer.checksum import checksum
from millrace.weights.transfer.delta.exchange import ReceivingDeltas
from millrace.weights.transfer.pipeline import ReceivedMessages, ReceivePipeline, SendPipeline
from millrace.weights.transfer.session import PublicationSession
from millrace.wire.address import host_name
from services.rollout.weights.in_worker.gather_broadcast import GatherBroadcastPath
from services.rollout.weights.in_worker.model import LoadedPart, WorkerLayout, WorkerModel, part_of
from services.rollout.weights.in_worker.sharded import IncomingShards, ShardedPath, TransferThread
from services.rollout.weights.transfer_request import NO_PLAN, TransferRequest, nothing_prepared
from services.rollout.weights.worker_methods import Described, Placed, Prepared, Received, Sent


class OutgoingTransfer(TransferThread[Sent]):
    """Everything that takes a while, the planning too, is done in its thread: the engine generates meanwhile."""

    def __init__(self, request: TransferRequest, rank: int, memory: Memory) -> None:
        """`memory` holds the boxes that the request names for sender `rank`."""
        self.session = PublicationSession()
        super().__init__(request, rank, partial(_send, request, rank, memory), memory.device, self.session)


def _send(request: TransferRequest, rank: int, memory: Memory, channel: Channel) -> Sent:
    plan = Planner().plan(request.manifest, request.layouts)
    # A new thread starts on the first GPU, whichever GPU its engine uses.
    with torch.cuda.device(memory.device) if memory.device.type == "cuda" else nullcontext():
        pipeline = SendPipeline(plan, rank, memory)
        sums, times = pipeline.run(channel)
    return Sent(tuple(sums.items()), times.pack_s, times.verify_s, pipeline.slot_bytes)


class IncomingTransfer(Protocol):
    """One version on its way into one worker. It is begun, waited for and placed, in this order, or closed."""

    def begin(self) -> None:
        """Starts receiving in a thread and returns at once."""

    def wait(self, at_most_s: float | None = None) -> Received | None:
        """Waits for the last byte; None if it is not there in time. Raises PublicationFailed if it will not
        come."""

    def place(self) -> Placed:
        """Puts what was received in place and compares it there. Only while generation is paused."""

    def close(self) -> None:
        """Ends what is under way: nothing is written after this."""


class IncomingPath(Protocol):
    """One path. It keeps from version to version what the next transfer can use."""

    def prepare(self, request: TransferRequest, rank: int) -> Prepared:
        """Checks a coming transfer, in which this worker has `rank`. Raises PublicationFailed if it does not fit."""

    def transfer(self, request: TransferRequest, rank: int, *, shadow: bool) -> IncomingTransfer:
        """Makes memory ready for a transfer that was prepared: for the whole version with `shadow`, else for a few
        messages at a time. Raises PublicationFailed if there is none."""


class DeltaPath:
    """See `IncomingPath`. A delta is received by the pipeline of the sharded path and over its communicator: only what
    a message is made of differs."""

    def __init__(self, sharded: ShardedPath) -> None:
        self._sharded = sharded

    def prepare(self, request: TransferRequest, rank: int) -> Prepared:
        return self._sharded.prepare(request, rank)

    def transfer(self, request: TransferRequest, rank: int, *, shadow: bool) -> IncomingShards:

        def receive(pipeline: ReceivePipeline, channel: MessageExchange) -> ReceivedMessages:
            exchange = ReceivingDeltas(channel, pipeline.stream)
            received = pipeline.run(exchange, onto_base=bool(request.base))
            return replace(received, times=replace(received.times, code_s=exchange.decode_s))

        return self._sharded.transfer(request, rank, shadow=shadow, receive=receive)


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
        with self._turn:
            decoded = Manifest.from_proto(weights_pb2.Manifest.FromString(manifest))
            part_of(self._model, decoded.content).check(decoded)
            return Described(self._layout.boxes(decoded).encode(), self._layout.of(decoded).untaken)

    def host(self) -> str:
        return host_name()

    def prepare(self, request: bytes) -> Prepared | None:
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
        with self._turn:
            request, self._prepared = self._prepared, None
            if request is None:
                raise nothing_prepared()
            self._incoming = self._paths[request.path].transfer(request, self._rank_in(request), shadow=shadow)
            self._written_part = part_of(self._model, request.manifest.content)

    def begin(self) -> None:
        with self._turn:
            if self._incoming is None:
                raise nothing_prepared()
            self._incoming.begin()

    def wait_received(self) -> Received | None:
        if (incoming := self._incoming) is None:
            raise nothing_prepared()
        return incoming.wait(WAIT_S)

    def place(self) -> Placed:
        with self._turn:
            incoming, self._incoming = self._incoming, None
            if incoming is None:
                raise nothing_prepared()
            placed = incoming.place()
            self._written_part.update_derived()
            return placed

    def abort(self) -> None:
        with self._turn:
            incoming, self._incoming, self._prepared = self._incoming, None, None
            if incoming is not None:
                incoming.close()

    def checksums(self) -> dict[str, int]:
        return {name: checksum(parameter) for name, parameter in self._model.parameters.items()}

    def prepare_send(self, request: bytes, served: str) -> bytes:
        with self._turn:
            self.end_send()
            rank = self._model.rank
            self._memory_to_send = self._layout.sender_memory(_whole(request), rank, served)
            return nccl_id(rank == 0 and self._memory_to_send.device.type == "cuda")

    def send(self, request: bytes) -> None:
        memory, self._memory_to_send = self._memory_to_send, None
        if memory is None:
            raise _copy_ended()
        self._outgoing = OutgoingTransfer(_whole(request), self._model.rank, memory)
        self._outgoing.begin()

    def wait_sent(self) -> Sent | None:
        if (outgoing := self._outgoing) is None:
            raise _copy_ended()
        return outgoing.wait(WAIT_S)

    def end_send(self) -> None:
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

"""The sender's side of a sharded publication: every rank sends what it holds; nothing is gathered."""

import secrets
import time
from dataclasses import dataclass

import numpy as np
import structlog
from torch.distributed import TCPStore

from millrace.errors import InvalidState, PublicationFailed
from millrace.weights.phases import PublicationId
from millrace.weights.plans import wire_layouts as wire
from millrace.weights.plans.memory import Memory
from millrace.weights.plans.sharded import ShardedPlan
from millrace.weights.transfer.channels.gloo import serve_store
from millrace.weights.transfer.channels.rendezvous import Rendezvous, nccl_id
from millrace.weights.transfer.pipeline import SendPipeline
from millrace.weights.transfer.session import PublicationSession
from millrace.wire.server import host_address
from millrace.wire.v1 import weights_pb2
from millrace.wire.v1.trainer_pb2 import (
    DescribeSendRequest,
    DescribeSendResponse,
    PrepareSendRequest,
    PrepareSendResponse,
    TransferSendResponse,
)
from services.trainer.protocol.backend import Backend
from services.trainer.ranks import collectives

log = structlog.get_logger(__name__)


def describe(request: DescribeSendRequest, backend: Backend) -> DescribeSendResponse:
    """What each rank holds. A collective."""
    memory = backend.shards(request.dtype)
    told = collectives.gather_bytes(b"" if memory is None else wire.encode([memory.layout.boxes]).SerializeToString())
    layouts = weights_pb2.Layouts()
    if all(told):
        layouts = wire.joined([weights_pb2.Layouts.FromString(data) for data in told])
    manifest = (memory.manifest if memory is not None else backend.manifest(request.dtype)).to_proto()
    return DescribeSendResponse(manifest=manifest, layouts=layouts, gpu=backend.device.type == "cuda")


@dataclass(frozen=True)
class Prepared:
    publication: PublicationId
    plan: ShardedPlan
    sending: SendPipeline
    bytes: int
    """Of one copy of the weights."""
    meeting: Rendezvous
    give_up: float
    seconds: float


class ShardSender:
    """One rank's. `prepare` and `transfer` are collectives on the ranks' main threads; `abort` comes from any."""

    def __init__(self, rank: int, member_id: str) -> None:
        self._rank = rank
        self._member_id = member_id
        self._session = PublicationSession()
        self._planner = wire.Planner()
        self._prepared: Prepared | None = None
        self._sending: tuple[bytes, list[int], SendPipeline] | None = None
        self._store: tuple[TCPStore, int] | None = None
        self._members: tuple[bytes, bool, tuple[str, ...]] | None = None
        self._nccl_id = b""

    def prepare(self, request: PrepareSendRequest, backend: Backend) -> PrepareSendResponse:
        began = time.monotonic()
        self._prepared = None
        with collectives.fail_together():
            memory = backend.shards(request.dtype)
            if memory is None:
                raise InvalidState("this model's shards are no boxes of its tensors.", "gather and broadcast it.")
            plan = self._planner.plan(memory.manifest, request.sides)
            sending = self._buffers(plan, memory, request.sides)
            rendezvous = self._rendezvous(request, plan) if self._rank == 0 else weights_pb2.Rendezvous()
        rendezvous = weights_pb2.Rendezvous.FromString(collectives.gather_bytes(rendezvous.SerializeToString())[0])
        with collectives.fail_together():
            if rendezvous.standing and self._session.key != rendezvous.key:
                raise PublicationFailed(f"rank {self._rank} of the trainer has left communicator {rendezvous.key}.")
        meeting = Rendezvous(
            rendezvous.host,
            rendezvous.port,
            rendezvous.key,
            self._rank,
            rendezvous.world_size,
            rendezvous.nccl_id,
            memory.device,
            request.deadline_s,
        )
        publication = PublicationId.from_proto(request.publication)
        self._session.begin()
        seconds = time.monotonic() - began
        self._prepared = Prepared(
            publication, plan, sending, memory.manifest.bytes, meeting, began + request.deadline_s, seconds
        )
        return PrepareSendResponse(rendezvous=rendezvous, plan_hash=plan.hash)

    def _buffers(self, plan: ShardedPlan, memory: Memory, sides: weights_pb2.Sides) -> SendPipeline:
        """Slots and views, kept as long as plan and parameters are the same."""
        at = [buffer.data_ptr() for buffer in memory.buffers]
        if self._sending is not None and self._sending[:2] == (plan.hash, at):
            return self._sending[2]
        told = wire.decode(sides.senders)
        if len(told) != collectives.world_size() or told[self._rank].hash != memory.layout.boxes.hash:
            what = f"rank {self._rank} of the trainer holds other shards than the publication was planned for."
            raise PublicationFailed(what, "publish again: the layouts are asked for anew.")
        self._sending = None  # before the new slots are made
        self._sending = (plan.hash, at, SendPipeline(plan, self._rank, memory))
        return self._sending[2]

    def _rendezvous(self, request: PrepareSendRequest, plan: ShardedPlan) -> weights_pb2.Rendezvous:
        """Rank 0's. The same communicator as long as the same members take part and nothing has failed."""
        members = (plan.hash, request.gpu, tuple(f"{r.member_id}/{r.first_rank}" for r in request.receivers))
        if self._store is None:
            self._store = serve_store(host_address(), plan.world_size, request.deadline_s)
        rendezvous = weights_pb2.Rendezvous(host=host_address(), port=self._store[1], world_size=plan.world_size)
        rendezvous.key, rendezvous.standing = self._session.key, bool(self._session.key) and members == self._members
        if not rendezvous.standing:
            rendezvous.key = f"{PublicationId.from_proto(request.publication).key}/{secrets.token_hex(8)}"
            self._nccl_id = nccl_id(request.gpu)
        rendezvous.nccl_id, self._members = self._nccl_id, members
        return rendezvous

    def transfer(self, publication: PublicationId) -> TransferSendResponse:
        prepared = self._prepared
        if prepared is None or prepared.publication != publication:
            raise InvalidState(f"publication {publication.key} is not prepared here.", "prepare it first.")
        began = time.monotonic()
        with collectives.fail_together():
            sums, times = self._session.run(prepared.meeting, publication.key, prepared.deadline, prepared.sending.run)
        told = collectives.gather_bytes(np.array([*sums.items()], np.uint64).tobytes())
        checksums = np.zeros(len(prepared.plan.sizes), np.uint64)
        for data in told:
            content, value = np.frombuffer(data, np.uint64).reshape(-1, 2).T
            checksums[content.astype(np.int64)] = value
        seconds = time.monotonic() - began
        slowest = collectives.maxima(
            {"pack": times.pack_s, "verify": times.verify_s, "slots": float(prepared.sending.slot_bytes)}
        )
        report = weights_pb2.MemberReport(
            member_id=self._member_id,
            bytes=prepared.bytes,
            prepare_s=prepared.seconds,
            gather_s=slowest["pack"],
            wire_s=max(0.0, seconds - slowest["pack"] - slowest["verify"]),
            verify_s=slowest["verify"],
            staging_bytes=int(slowest["slots"]),
        )
        return TransferSendResponse(checksums=weights_pb2.Checksums(values=checksums.tolist()), report=report)

    def abort(self, reason: str) -> None:
        """Makes a transfer in progress fail, on every rank."""
        if self._prepared is not None:
            self._session.fail(reason)

    def finish(self, failed: bool) -> None:
        """After a publication: the communicator is kept for the next one unless this one failed."""
        self._prepared = None
        if failed:
            self.close()

    def close(self) -> None:
        """Frees the communicator, slots and the store. Not during a transfer."""
        self._prepared = None
        self._session.leave()
        self._members = None
        self._sending = None
        self._store = None

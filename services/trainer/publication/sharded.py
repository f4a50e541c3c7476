"""The sharded transfer: every rank sends the boxes that it holds to the ranks that want them; nothing is gathered."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.distributed import TCPStore

from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.contracts.v1 import weights_pb2
from millrace.errors import InvalidState, PublicationFailed
from millrace.weights.phases import PublicationId
from millrace.weights.plans import wire_layouts
from millrace.weights.plans.manifest import Content
from millrace.weights.plans.memory import Memory
from millrace.weights.plans.sharded import ShardedPlan
from millrace.weights.transfer.channels.channel import Channel
from millrace.weights.transfer.channels.rendezvous import Rendezvous, nccl_id
from millrace.weights.transfer.delta.exchange import SendingDeltas, Snapshot
from millrace.weights.transfer.pipeline import SendPipeline, TransferTimes
from millrace.weights.transfer.session import PublicationSession
from millrace.weights.transfer.store import serve_store
from millrace.wire.address import host_address, host_name
from services.trainer.memory import exhausted
from services.trainer.protocol.backend import Backend, published
from services.trainer.ranks import collectives


def describe(request: pb.DescribeSendRequest, backend: Backend) -> pb.DescribeSendResponse:
    """What is published, and which boxes of it each rank holds; no layouts if a rank cannot describe its memory in
    boxes. A collective. Raises OutOfMemory on every rank if one has no memory for what it computes for that."""
    source = published(backend, Content.of(request.content))
    with collectives.fail_together(), exhausted.as_error():
        memory = source.shards(request.dtype)
    own = b"" if memory is None else wire_layouts.encode([memory.layout.boxes], [host_name()]).SerializeToString()
    of_ranks = collectives.gather_bytes(own)
    layouts = weights_pb2.Layouts()
    if all(of_ranks):
        layouts = wire_layouts.joined([weights_pb2.Layouts.FromString(data) for data in of_ranks])
    manifest = (memory.manifest if memory is not None else source.manifest(request.dtype)).to_proto()
    return pb.DescribeSendResponse(manifest=manifest, layouts=layouts, gpu=backend.device.type == "cuda", deltas=True)


@dataclass(frozen=True)
class Prepared:
    """The publication as PREPARE settled it."""

    publication: PublicationId
    plan: ShardedPlan
    pipeline: SendPipeline
    bytes: int
    """Size of one copy of the weights."""
    rendezvous: Rendezvous
    deadline: float
    """time.monotonic() when the publication has failed."""
    seconds: float
    """How long PREPARE took."""


class ShardedTransfer:
    """An `OutgoingTransfer`. The communicator, the plan and the buffers are kept from version to version."""

    def __init__(self, rank: int, member_id: str) -> None:
        self._rank = rank
        self._member_id = member_id
        self._session = PublicationSession()
        self._planner = wire_layouts.Planner()
        self._communicator = _CommunicatorHost()
        self._prepared: Prepared | None = None
        self._pipeline: tuple[bytes, list[int], SendPipeline] | None = None
        """The hash of the plan and the addresses of the parameters that it was made for, and the pipeline."""

    @property
    def publication(self) -> PublicationId | None:
        prepared = self._prepared
        return prepared.publication if prepared is not None else None

    def prepare_send(self, request: pb.PrepareSendRequest, backend: Backend) -> pb.PrepareSendResponse:
        """See `OutgoingTransfer`. Raises InvalidState if a rank cannot describe its memory in boxes,
        PublicationFailed if it holds other boxes than the publication was planned for, OutOfMemory on every rank
        if one has no memory for its buffers."""
        began = time.monotonic()
        self._prepared = None
        with collectives.fail_together(), exhausted.as_error():
            memory = published(backend, Content.of(request.content)).shards(request.dtype)
            if memory is None:
                raise InvalidState("this model's shards are not boxes of its tensors.", "gather and broadcast it.")
            plan = self._planner.plan(memory.manifest, request.sides)
            pipeline = self._kept_pipeline(plan, memory, request.sides)
            own = weights_pb2.Rendezvous()
            if self._rank == 0:
                own = self._communicator.rendezvous(request, plan, self._session.key)
        agreed = weights_pb2.Rendezvous.FromString(collectives.gather_bytes(own.SerializeToString())[0])
        with collectives.fail_together():
            if agreed.standing and self._session.key != agreed.key:
                raise PublicationFailed(f"rank {self._rank} of the trainer has left communicator {agreed.key}.")
        self._session.begin()
        self._prepared = Prepared(
            PublicationId.from_proto(request.publication),
            plan,
            pipeline,
            memory.manifest.bytes,
            Rendezvous.of_rank(agreed, self._rank, memory.device, request.deadline_s),
            began + request.deadline_s,
            time.monotonic() - began,
        )
        return pb.PrepareSendResponse(rendezvous=agreed, plan_hash=plan.hash)

    def _kept_pipeline(self, plan: ShardedPlan, memory: Memory, layouts: weights_pb2.Sides) -> SendPipeline:
        """The pipeline of the last publication, or a new one if the plan or the parameters' memory has changed."""
        addresses = [buffer.data_ptr() for buffer in memory.buffers]
        if self._pipeline is not None and self._pipeline[:2] == (plan.hash, addresses):
            return self._pipeline[2]
        senders = wire_layouts.decode(layouts.senders)
        if len(senders) != collectives.world_size() or senders[self._rank].hash != memory.layout.boxes.hash:
            what = f"rank {self._rank} of the trainer holds other shards than the publication was planned for."
            raise PublicationFailed(what, "publish again: the layouts are asked for anew.")
        self._pipeline = None  # frees its buffers before new ones are allocated
        self._pipeline = (plan.hash, addresses, SendPipeline(plan, self._rank, memory))
        return self._pipeline[2]

    def transfer(self, request: pb.TransferSendRequest, backend: Backend) -> pb.TransferSendResponse:
        """See `OutgoingTransfer`. Raises OutOfMemory on every rank if one has no memory left."""
        prepared = self._prepared
        assert prepared is not None, "the sender compares `publication` first"
        began = time.monotonic()

        def send(channel: Channel) -> tuple[Mapping[int, int], TransferTimes]:
            with exhausted.as_error():
                return self._send(prepared, channel, request)

        with collectives.fail_together():
            own, times = self._session.run(prepared.rendezvous, prepared.publication.key, prepared.deadline, send)
        checksums = np.zeros(len(prepared.plan.sizes), np.uint64)
        for data in collectives.gather_bytes(np.array([*own.items()], np.uint64).tobytes()):
            content, value = np.frombuffer(data, np.uint64).reshape(-1, 2).T
            checksums[content.astype(np.int64)] = value
        report = self._report(prepared, times, time.monotonic() - began)
        return pb.TransferSendResponse(checksums=weights_pb2.Checksums(values=checksums.tolist()), report=report)

    def _send(
        self, prepared: Prepared, channel: Channel, request: pb.TransferSendRequest
    ) -> tuple[Mapping[int, int], TransferTimes]:
        """This rank's checksums by content, and its seconds."""
        return prepared.pipeline.run(channel)

    def _report(self, prepared: Prepared, times: TransferTimes, seconds: float) -> weights_pb2.MemberReport:
        """Seconds and buffer bytes are those of the rank that has most. A collective."""
        buffers = float(prepared.pipeline.slot_bytes)
        figures = {"pack": times.pack_s, "verify": times.verify_s, "code": times.code_s, "buffers": buffers}
        most = collectives.maxima(figures)
        return weights_pb2.MemberReport(
            member_id=self._member_id,
            bytes=prepared.bytes,
            prepare_s=prepared.seconds,
            gather_s=most["pack"],
            wire_s=max(0.0, seconds - most["pack"] - most["verify"] - most["code"]),
            verify_s=most["verify"],
            staging_bytes=int(most["buffers"]),
            sent_bytes=int(prepared.plan.egress()[: prepared.plan.senders].sum()),
            code_s=most["code"],
        )

    def abort(self, reason: str) -> None:
        """See `OutgoingTransfer`. The transfer fails on every rank."""
        if self._prepared is not None:
            self._session.fail(reason)

    def finish(self, *, failed: bool) -> None:
        """See `OutgoingTransfer`. Communicator, plan and buffers are kept unless it failed."""
        self._prepared = None
        if failed:
            self.close()

    def close(self) -> None:
        self._prepared = None
        self._session.leave()
        self._pipeline = None
        self._communicator.close()


class _CommunicatorHost:
    """Rank 0's decision about where the communicator is joined, and whether the last one is used again."""

    def __init__(self) -> None:
        self._store: tuple[TCPStore, int] | None = None
        self._members: tuple[bytes, bool, tuple[str, ...]] | None = None
        """The last communicator: hash of the plan, whether on GPUs, and each receiver with its first rank."""
        self._nccl_id = b""

    def rendezvous(self, request: pb.PrepareSendRequest, plan: ShardedPlan, joined: str) -> weights_pb2.Rendezvous:
        """The communicator with key `joined` again, as long as the same members take part and it has not failed (its
        key is empty then); else a new one."""
        members = (plan.hash, request.gpu, tuple(f"{r.member_id}/{r.first_rank}" for r in request.receivers))
        if self._store is None:
            self._store = serve_store(host_address(), plan.world_size, request.deadline_s)
        standing, key = bool(joined) and members == self._members, joined
        if not standing:
            key = f"{PublicationId.from_proto(request.publication).key}/{secrets.token_hex(8)}"
            self._nccl_id = nccl_id(request.gpu)
        self._members = members
        return weights_pb2.Rendezvous(
            host=host_address(),
            port=self._store[1],
            world_size=plan.world_size,
            key=key,
            nccl_id=self._nccl_id,
            standing=standing,
        )

    def close(self) -> None:
        """Ends the store; the next communicator is a new one."""
        self._members = self._store = None


class DeltaTransfer(ShardedTransfer):
    """An `OutgoingTransfer` that sends only what changed since the version that the receivers hold.

    It is the sharded transfer with another channel: plan, communicator, rounds and checksums are the same. What is
    added is a snapshot of what was sent last, in host memory (`millrace/weights/transfer/delta/exchange.py`), and this
    rule:

    **Changes are sent only against a publication that every rank has kept whole and every receiver has put in place.**
    Rank 0 learns of the latter by `finish`; until then, and after any failure, the snapshot counts as nobody's. PREPARE
    names that publication to the receivers, and a receiver that holds another one asks for everything.
    """

    def __init__(self, rank: int, member_id: str) -> None:
        super().__init__(rank, member_id)
        self._snapshot: Snapshot | None = None
        self._base: PublicationId | None = None
        """The publication that changes can be sent against, as all ranks agreed in PREPARE."""
        self._kept: PublicationId | None = None
        """The publication whose messages the snapshot holds whole."""
        self._committed: PublicationId | None = None
        """The publication that succeeded last; on rank 0 only."""
        self._sent = np.zeros(3, np.int64)
        """Figures of the last transfer: bytes sent, 16-bit words compared, words changed."""

    def prepare_send(self, request: pb.PrepareSendRequest, backend: Backend) -> pb.PrepareSendResponse:
        """See `ShardedTransfer.prepare`. Raises PublicationFailed if there is no host memory for the snapshot."""
        answer = super().prepare_send(request, backend)
        with collectives.fail_together(), exhausted.as_error():
            self._make_snapshot()
        own = self._kept if self._rank > 0 or self._kept == self._committed else None
        ref = weights_pb2.PublicationRef() if own is None else own.to_proto()
        of_ranks = collectives.gather_bytes(ref.SerializeToString(deterministic=True))
        self._base = own if own is not None and len(set(of_ranks)) == 1 else None
        if self._base is not None:
            answer.base.CopyFrom(ref)
        return answer

    def _make_snapshot(self) -> None:
        """Keeps the snapshot as long as the plan, and with it the messages, stay the same."""
        assert self._prepared is not None
        plan, pipeline = self._prepared.plan, self._prepared.pipeline
        if self._snapshot is not None and self._snapshot.plan_hash == plan.hash:
            return
        self._snapshot = self._kept = None  # frees its memory before more is taken
        size = sum(pipeline.packed.values())
        try:
            self._snapshot = Snapshot(plan.hash, pipeline.packed, pipeline.device)
        except torch.OutOfMemoryError:  # of the device; `as_error` says that
            raise
        except RuntimeError as error:  # torch's out of memory
            what = f"rank {self._rank} of the trainer has no {size / 1e9:.1f} GB of host memory to keep what it sends."
            raise PublicationFailed(what, 'set publication.path to "sharded".') from error

    def _send(
        self, prepared: Prepared, channel: Channel, request: pb.TransferSendRequest
    ) -> tuple[Mapping[int, int], TransferTimes]:
        assert self._snapshot is not None, "PREPARE makes it"
        whole = request.whole or self._base is None
        self._kept = self._committed = None  # until everything is sent, and then until everything is in place
        exchange = SendingDeltas(channel, self._snapshot, prepared.pipeline.stream, whole=whole)
        checksums, times = prepared.pipeline.run(exchange)
        self._kept = prepared.publication
        self._sent = np.array([exchange.sent_bytes, exchange.packed_words, exchange.changed_words], np.int64)
        return checksums, replace(times, code_s=exchange.encode_s)

    def _report(self, prepared: Prepared, times: TransferTimes, seconds: float) -> weights_pb2.MemberReport:
        report = super()._report(prepared, times, seconds)
        of_ranks = [np.frombuffer(data, np.int64) for data in collectives.gather_bytes(self._sent.tobytes())]
        sent, words, changed = np.sum(of_ranks, axis=0).tolist()
        assert self._snapshot is not None
        report.sent_bytes, report.changed = sent, changed / words if words else 0.0
        report.snapshot_bytes = int(collectives.maxima({"snapshot": float(self._snapshot.bytes)})["snapshot"])
        return report

    def finish(self, *, failed: bool) -> None:
        """See `OutgoingTransfer`. After success the receivers hold what the snapshot holds."""
        if not failed and self._prepared is not None:
            self._committed = self._prepared.publication
        super().finish(failed=failed)

    def close(self) -> None:
        super().close()
        self._snapshot = self._kept = self._committed = None

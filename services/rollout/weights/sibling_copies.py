"""The sender's side of a copy: the version that this replica serves is sent to siblings that join the job."""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import structlog
from torch.distributed import TCPStore

from millrace.contracts.v1 import trainer_pb2, weights_pb2
from millrace.errors import Fenced, InvalidState, PublicationFailed
from millrace.ids import JobId, MemberId, Version
from millrace.weights.phases import Phase, PublicationId, PublicationState
from millrace.weights.plans import wire_layouts
from millrace.weights.plans.manifest import Content, Manifest
from millrace.weights.plans.sharded import ShardedPlan
from millrace.weights.transfer.channels.rendezvous import serve_store
from millrace.wire.address import host_address
from services.rollout.weights.engine_weights import EngineWeights
from services.rollout.weights.transfer_request import TransferRequest

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ServedContent:
    """What one publication has put in place."""

    publication: PublicationId
    manifest: Manifest


@dataclass(frozen=True)
class ServedVersion:
    """A version that may be copied: the model, or an adapter and its base."""

    job: JobId
    version: Version
    contents: Mapping[Content, ServedContent]


@dataclass(frozen=True)
class _Prepared:
    request: TransferRequest
    plan: ShardedPlan
    store: TCPStore
    """The store where the communicator's ranks meet. It is served for as long as this object lives."""
    answer: trainer_pb2.PrepareSendResponse
    seconds: float


class SiblingCopies:
    """One replica's part in the joining of others. `turn` is held by whatever may change the engine's parameters;
    `copyable` returns the served version, or None while a publication is about to change it."""

    def __init__(
        self,
        engine: EngineWeights,
        member_id: MemberId,
        turn: asyncio.Lock,
        copyable: Callable[[], ServedVersion | None],
    ) -> None:
        self._engine = engine
        self._member_id = member_id
        self._turn = turn
        self._copyable = copyable
        self._state = PublicationState()
        self._prepared: _Prepared | None = None
        self._sending: asyncio.Task[trainer_pb2.TransferSendResponse] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._expiry: asyncio.Task[None] | None = None

    async def describe(self, content: Content) -> trainer_pb2.DescribeSendResponse:
        """The manifest of `content`, and the boxes of each worker. Raises InvalidState if it cannot be copied
        now."""
        _, served = self._served(content)
        boxes, hosts = await self._engine.describe(served.manifest), await self._engine.hosts()
        return trainer_pb2.DescribeSendResponse(
            manifest=served.manifest.to_proto(),
            layouts=wire_layouts.encode(boxes, hosts),
            gpu=self._engine.device != "cpu",
        )

    async def prepare_copy(self, request: trainer_pb2.PrepareSendRequest) -> trainer_pb2.PrepareSendResponse:
        """Plan and rendezvous. Raises Fenced for another version than the one that is served."""
        publication, began = PublicationId.from_proto(request.publication), time.perf_counter()
        async with self._turn:
            state = self._state.advance(publication, Phase.PREPARE)
            if state is self._state and self._prepared is not None:
                return self._prepared.answer
            version, served = self._served(Content.of(request.content))
            if (publication.job, publication.version) != (version.job, version.version):
                serves = f"{version.job}/{version.version}"
                what = f"copy {publication.key} is of another version than {self._member_id} serves: {serves}."
                raise Fenced(what, "copy from another replica, or publish the version.")
            if request.path != weights_pb2.PATH_SHARDED:
                raise InvalidState(f"a replica sends by no path {request.path}.", "let the trainer publish.")
            await self._end()
            self._state = state
            prepared = await self._make_ready(request, served, began)
            if self._state is not state:
                await self._engine.end_send()
                raise Fenced(f"copy {publication.key} was ended while it was prepared.", "begin a new attempt.")
            self._prepared = prepared
            self._expire_after(request.deadline_s, publication)
            return prepared.answer

    async def _make_ready(
        self, request: trainer_pb2.PrepareSendRequest, served: ServedContent, began: float
    ) -> _Prepared:
        manifest, copy = served.manifest, PublicationId.from_proto(request.publication)
        key = copy.key
        plan = await asyncio.to_thread(wire_layouts.Planner().plan, manifest, request.sides)
        store, port = serve_store(host_address(), plan.world_size, request.deadline_s)
        transfer = TransferRequest(
            key=key,
            version=copy.version,
            manifest=manifest,
            host=host_address(),
            port=port,
            world_size=plan.world_size,
            first_rank=0,
            timeout_s=request.deadline_s,
            path=weights_pb2.PATH_SHARDED,
            layouts=request.sides,
            communicator=f"{key}/{secrets.token_hex(8)}",
            leave_after=True,
        )
        nccl_id = await self._engine.prepare_send(transfer, served.publication.key)
        transfer = replace(transfer, nccl_id=nccl_id)
        rendezvous = weights_pb2.Rendezvous(
            host=transfer.host,
            port=port,
            world_size=plan.world_size,
            key=transfer.communicator,
            nccl_id=nccl_id,
            passing=True,
        )
        answer = trainer_pb2.PrepareSendResponse(rendezvous=rendezvous, plan_hash=plan.hash)
        return _Prepared(transfer, plan, store, answer, time.perf_counter() - began)

    async def transfer(self, publication: PublicationId) -> trainer_pb2.TransferSendResponse:
        """Sends; returns when the last byte is sent. Raises PublicationFailed if it fails or is ended."""
        state = self._state.advance(publication, Phase.TRANSFER)
        if state is not self._state:
            assert self._prepared is not None
            self._state = state
            self._sending = asyncio.create_task(self._send(self._prepared))
        if self._sending is None:
            raise InvalidState(f"copy {publication.key} was ended.", "prepare it again with a new attempt.")
        return await asyncio.shield(self._sending)

    async def _send(self, prepared: _Prepared) -> trainer_pb2.TransferSendResponse:
        began, request = time.perf_counter(), prepared.request
        sent = await self._engine.send(request)
        seconds = time.perf_counter() - began
        checksums = dict(sent.checksums)
        if missing := len(prepared.plan.sizes) - len(checksums):
            raise PublicationFailed(f"{missing} messages of copy {request.key} were not sent.", "report it.")
        log.info("version copied to siblings", key=request.key, seconds=round(seconds, 4))
        report = weights_pb2.MemberReport(
            member_id=self._member_id,
            bytes=request.manifest.bytes,
            prepare_s=prepared.seconds,
            gather_s=sent.pack_s,
            wire_s=max(0.0, seconds - sent.pack_s - sent.checksum_s),
            verify_s=sent.checksum_s,
            staging_bytes=sent.slot_bytes,
        )
        values = [checksums[number] for number in range(len(checksums))]
        return trainer_pb2.TransferSendResponse(checksums=weights_pb2.Checksums(values=values), report=report)

    async def finish(self, publication: PublicationId) -> None:
        """Ends the copy if it is under way and frees its memory. Another copy is not touched. Idempotent."""
        if publication == self._state.publication:
            await self._end()

    async def give_way(self, newer: PublicationId, content: Content) -> None:
        """Ends a copy before publication `newer` of `content` changes what is copied. Older copies are refused from now
        on."""
        copied = self._prepared.request.manifest.content if self._prepared is not None else None
        if (content, copied) == (Content.ADAPTER, Content.BASE):
            return
        await self._end()
        current = self._state.publication
        if current is None or current.job != newer.job or current < newer:
            self._state = PublicationState(newer)

    async def close(self) -> None:
        await self._end()

    async def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        sending, self._sending, self._prepared = self._sending, None, None
        begun, self._state = self._state.phase is not Phase.NONE, self._state.fail()
        if begun:
            await self._engine.end_send()
        if sending is not None:
            await asyncio.wait([sending])
            if not sending.cancelled() and (error := sending.exception()) is not None:
                log.warning("a copy ended early", error=str(error))

    def _served(self, content: Content) -> tuple[ServedVersion, ServedContent]:
        """The version that is served, and the part of it that `content` names."""
        if (served := self._copyable()) is None or content not in served.contents:
            what = f"{self._member_id} serves no version that can be copied now."
            raise InvalidState(what, "copy from another replica, or publish the version.")
        return served, served.contents[content]

    def _expire_after(self, seconds: float, publication: PublicationId) -> None:
        """Ends the copy after `seconds`, even if nobody calls again."""

        def expire() -> None:
            self._expiry = asyncio.create_task(self.finish(publication))

        self._deadline = asyncio.get_running_loop().call_later(seconds, expire)

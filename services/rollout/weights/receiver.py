"""The receiver's side of a publication in the replica: phases in order, each idempotent, older epochs refused."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import structlog

from millrace.contracts.v1 import rollout_pb2, weights_pb2
from millrace.errors import InvalidState, PublicationFailed
from millrace.ids import MemberId, Version
from millrace.spec.rollout import CachePolicy
from millrace.telemetry.spans.context import current
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import RECORDER
from millrace.weights.phases import Phase, PublicationId, PublicationState
from millrace.weights.plans.manifest import Content
from millrace.weights.plans.wire_layouts import Planner
from services.rollout.weights.engine_weights import CommitReport, EngineWeights
from services.rollout.weights.sibling_copies import ServedContent, ServedVersion, SiblingCopies
from services.rollout.weights.transfer_request import NO_PLAN, ExpectedMessages, TransferRequest, expected
from services.rollout.weights.worker_methods import Received

log = structlog.get_logger(__name__)
VERSION_COMMITTED = "version committed"
"""Event of the log, for benchmarks."""
UNFINISHED = (Phase.PREPARE, Phase.TRANSFER, Phase.VERIFY)


@dataclass(frozen=True)
class Agreed:
    """The answer to PREPARE."""

    plan_hash: bytes
    """Empty if the request only names a plan that is not known here."""
    begun: bool = False
    """Whether this replica receives already."""
    lacks_base: bool = False
    """Whether changes against the base of the request are of no use, because something else is in place."""


@dataclass(frozen=True)
class _Prepared:
    """The result of PREPARE."""

    request: TransferRequest
    expected: ExpectedMessages
    seconds: float
    lacks_base: bool


class PublicationReceiver:
    """One replica's state in publications, for one job on one engine.

    `on_version` is called with the version that is served from now on, or None if a commit failed half-way and
    nothing may be served. `on_report` is called with this member's report of each publication that it commits.
    """

    def __init__(
        self,
        engine: EngineWeights,
        member_id: MemberId,
        cache_policy: CachePolicy,
        on_version: Callable[[Version | None], None],
        on_report: Callable[[weights_pb2.MemberReport], None] = lambda _: None,
    ) -> None:
        self._engine = engine
        self._member_id = member_id
        self._cache_policy = cache_policy
        self._on_version = on_version
        self._on_report = on_report
        self._state = PublicationState()
        self._preparing: PublicationId | None = None
        self._cancelled: PublicationId | None = None
        """The publication that was aborted while it was being prepared."""
        self._aborting: PublicationId | None = None
        """The publication whose bytes are being dropped, or were."""
        self._committing: PublicationId | None = None
        self._closed = False
        self._turn = asyncio.Lock()
        self._in_place: dict[Content, ServedContent] = {}
        self.copies = SiblingCopies(engine, member_id, self._turn, self._copyable)
        """Copies of the served version to siblings."""
        self._prepared: _Prepared | None = None
        """The result of PREPARE, for the publication of `_state`."""
        self._known_plan = NO_PLAN
        self._planner = Planner()
        self._received: Received | None = None
        self._began_s = 0.0
        """Unix time at which the last transfer began."""
        self._report = weights_pb2.MemberReport()
        self._deadline: asyncio.TimerHandle | None = None
        self._expiry: asyncio.Task[None] | None = None

    async def agree_on_plan(self, request: rollout_pb2.PrepareReceiveRequest) -> Agreed:
        """Checks manifest and plan. Also starts to receive, if the request asks for it and an abort would cost
        nothing, since generation goes on. Raises Fenced, InvalidState and PublicationFailed if the publication is
        refused."""
        publication = PublicationId.from_proto(request.publication)
        if not self._has_begun(request, publication):
            self._state.advance(publication, Phase.PREPARE)
            await self._abort_older(publication)
        async with self._turn:
            if self._closed:
                raise InvalidState(f"{self._member_id} has left this job.", "list the members with `millrace fleet`.")
            if not self._has_begun(request, publication):
                state = self._state.advance(publication, Phase.PREPARE)
                is_new = state is not self._state or self._prepared is None
                if is_new and not await self._prepare(request, publication, state):
                    return Agreed(b"")
                if request.begin and self._engine.generates_while_receiving:
                    await self._begin(publication)
            assert self._prepared is not None
            begun, prepared = self._state.phase is Phase.TRANSFER, self._prepared
            return Agreed(prepared.expected.plan_hash, begun, prepared.lacks_base)

    def _has_begun(self, request: rollout_pb2.PrepareReceiveRequest, publication: PublicationId) -> bool:
        """Whether this is a repeated request, whose publication was prepared and begun before."""
        return request.begin and publication == self._state.publication and self._state.phase is Phase.TRANSFER

    async def _prepare(
        self, request: rollout_pb2.PrepareReceiveRequest, publication: PublicationId, state: PublicationState
    ) -> bool:
        """PREPARE, in its turn. False if the request only names a plan that is not known here."""
        started = time.perf_counter()
        if self._state.phase in UNFINISHED:
            self._state = self._state.fail()
        transfer = TransferRequest.from_proto(request, self._known_plan)
        if transfer is None:
            return False
        self._preparing = publication
        try:
            self._check_base(transfer.manifest.content)
            await self.copies.give_way(publication, transfer.manifest.content)
            messages = self._agreed(request, transfer)
            lacks_base = transfer.base != "" and transfer.base != self._key_in_place(transfer.manifest.content)
            base = "" if lacks_base else transfer.base
            transfer = replace(transfer, plan_hash=messages.plan_hash, base=base)
            self._known_plan = transfer.known_plan
            await self._engine.prepare_receive(transfer)
            if self._closed or self._cancelled == publication:
                await self._engine.abort_receive()
                raise PublicationFailed(f"publication {publication.key} was aborted while it was prepared.")
        finally:
            self._preparing = None
        self._state = state
        self._prepared = _Prepared(transfer, messages, time.perf_counter() - started, lacks_base)
        self._expire_after(request.deadline_s, publication)
        return True

    @property
    def has_base(self) -> bool:
        """Whether the base of the job's adapter is in place, so that publications need to bring the adapter only."""
        return Content.BASE in self._in_place

    def _check_base(self, content: Content) -> None:
        """Raises PublicationFailed for an adapter whose base is not here."""
        if content is Content.ADAPTER and not self.has_base:
            what = f"{self._member_id} does not hold the base of the adapter."
            raise PublicationFailed(what, "publish the base to it first.", (self._member_id,))

    def _agreed(self, request: rollout_pb2.PrepareReceiveRequest, transfer: TransferRequest) -> ExpectedMessages:
        """The messages that this replica receives. Raises PublicationFailed if the sender has another plan."""
        if request.receiver.world_size != self._engine.world_size:
            what = f"{self._member_id} has {self._engine.world_size} workers, not {request.receiver.world_size}."
            raise PublicationFailed(what, "configure it again.", (self._member_id,))
        messages = expected(transfer, self._engine.world_size, self._planner)
        if request.plan_hash and messages.plan_hash != request.plan_hash:
            ours, theirs = messages.plan_hash.hex()[:12], request.plan_hash.hex()[:12]
            what = f"{self._member_id} plans {ours}, the sender {theirs}."
            raise PublicationFailed(what, "run the same release of millrace everywhere.", (self._member_id,))
        return messages

    async def transfer(self, publication: PublicationId) -> None:
        """Starts receiving and returns at once."""
        async with self._turn:
            await self._begin(publication)

    async def _begin(self, publication: PublicationId) -> None:
        state = self._state.advance(publication, Phase.TRANSFER)
        if state is not self._state:
            self._began_s = time.time()
            await self._engine.begin_receive()
            self._state = state

    async def verify(self, publication: PublicationId, checksums: Sequence[int]) -> None:
        """Waits for the last byte and compares with the sender's checksums. Raises PublicationFailed if bytes did
        not come or differ; the old version is still served then."""
        async with self._turn:
            state = self._state.advance(publication, Phase.VERIFY)
            if state is self._state:
                return
            assert self._prepared is not None
            try:
                self._received = await self._engine.received()
                wire_s = self._received.wire_s
                RECORDER.past(SpanKind.TRANSFER, current(), self._began_s, time.time(), figures={"wire_s": wire_s})
                self._prepared.expected.compare(self._received.checksums, checksums, self._member_id)
            except PublicationFailed as error:
                self._state = self._state.fail()
                await self._drop()
                raise self._with_culprit(error) from error
            self._state = state

    async def commit(self, publication: PublicationId) -> weights_pb2.MemberReport:
        """Puts the version in place. Raises PublicationFailed if that fails: no version is served then."""
        async with self._turn:
            state = self._state.advance(publication, Phase.COMMIT)
            if state is self._state:
                return self._report
            if self._aborting == publication:
                raise PublicationFailed(f"publication {publication.key} was aborted before its commit.")
            self._stop_clock()
            self._committing, whole = publication, False
            assert self._prepared is not None
            content = self._prepared.request.manifest.content
            try:
                version = None if content is Content.BASE else publication.version
                committed = await self._engine.commit(version, self._cache_policy)
                now_s, whole = time.time(), True
                in_place = float(committed.mode == weights_pb2.COMMIT_MODE_INPLACE)
                pause = (now_s - committed.pause_s, now_s)
                RECORDER.past(SpanKind.PAUSE, current(), *pause, figures={"in_place": in_place})
            except PublicationFailed as error:
                raise self._with_culprit(error) from error
            finally:
                self._committing = None
                self._state = state if whole else self._state.fail()
                self._placed(content, publication if whole else None)
            self._report = self._member_report(committed)
            self._on_report(self._report)
            pause_s = round(committed.pause_s, 4)
            log.info(VERSION_COMMITTED, version=publication.version, content=content.name.lower(), pause_s=pause_s)
            return self._report

    async def abort(self, publication: PublicationId, reason: str) -> None:
        """Ends the publication, unless it is not the one under way. A COMMIT is waited for. Idempotent."""
        if publication == self._preparing:
            self._cancelled = publication
        if publication != self._state.publication or self._state.phase not in UNFINISHED:
            return
        if publication != self._committing:
            self._aborting = publication
            # Before the lock: a VERIFY that waits for bytes holds it, and ends by this.
            await self._drop()
        async with self._turn:
            if publication == self._state.publication and self._state.phase in UNFINISHED:
                self._state, self._aborting = self._state.fail(), None
                self._stop_clock()
                log.warning("publication aborted", publication=publication.key, reason=reason)

    async def close(self) -> None:
        """Ends an unfinished publication and a copy. Nothing may be called after this."""
        self._closed = True
        await self.copies.close()
        if self._state.publication is not None:
            await self.abort(self._state.publication, "the replica serves something else")
        async with self._turn:  # one that is being prepared ends by itself
            self._stop_clock()

    async def _abort_older(self, newer: PublicationId) -> None:
        current = self._state.publication
        if current is not None and current != newer:
            await self.abort(current, f"{newer.key} begins")

    async def _drop(self) -> None:
        """Ends the transfer. If a part of it is in place already, nothing can be served any more."""
        half_written = self._engine.half_written
        await self._engine.abort_receive()
        if half_written and self._prepared is not None:
            self._placed(self._prepared.request.manifest.content, None)

    def _placed(self, content: Content, publication: PublicationId | None) -> None:
        """Records what is in place. None means a half-written mix of two versions. An adapter leaves its base as it
        is; whatever else is written leaves nothing of what was there."""
        if content is Content.ADAPTER:
            self._in_place.pop(content, None)
        else:
            self._in_place.clear()
        if publication is not None and self._prepared is not None:
            self._in_place[content] = ServedContent(publication, self._prepared.request.manifest)
        served = self._served
        self._on_version(served.version if served is not None else None)

    @property
    def _served(self) -> PublicationId | None:
        """The publication whose version is served."""
        found = self._in_place.get(Content.MODEL) or self._in_place.get(Content.ADAPTER)
        return None if found is None else found.publication

    def _key_in_place(self, content: Content) -> str:
        """Key of the publication of `content` that is in place; empty for none."""
        found = self._in_place.get(content)
        return "" if found is None else found.publication.key

    def _copyable(self) -> ServedVersion | None:
        """The version that is served, unless a publication is about to change it."""
        if self._state.phase in UNFINISHED or (served := self._served) is None:
            return None
        return ServedVersion(served.job, served.version, dict(self._in_place))

    def _with_culprit(self, error: PublicationFailed) -> PublicationFailed:
        """The same error, with this member as the culprit if none is named."""
        return PublicationFailed(error.what, error.fix, error.culprits or (self._member_id,))

    def _member_report(self, committed: CommitReport) -> weights_pb2.MemberReport:
        prepared, received = self._prepared, self._received
        assert prepared is not None and received is not None
        placed = committed.placed
        return weights_pb2.MemberReport(
            member_id=self._member_id,
            bytes=prepared.expected.bytes,
            prepare_s=prepared.seconds,
            wire_s=received.wire_s,
            verify_s=received.checksum_s + placed.compare_s,
            apply_s=placed.apply_s,
            pause_s=committed.pause_s,
            loader_tensors=placed.loader_tensors,
            loader_bytes=placed.loader_bytes,
            staging_bytes=placed.staging_bytes,
            mode=committed.mode,
            loader_names=placed.loader_names,
            code_s=received.code_s,
            idle_ratio=committed.idle_ratio,
        )

    def _expire_after(self, seconds: float, publication: PublicationId) -> None:
        """Aborts the publication after `seconds`, even if nobody calls again."""

        def expire() -> None:
            reason = f"not committed within {seconds:g} s"
            self._expiry = asyncio.create_task(self.abort(publication, reason))

        self._stop_clock()
        self._deadline = asyncio.get_running_loop().call_later(seconds, expire)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

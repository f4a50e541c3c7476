"""The receiver's side of a publication: phases in order, each idempotent, older epochs refused. Engine-neutral."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from millrace.errors import InvalidState, PublicationFailed
from millrace.ids import MemberId, Version
from millrace.spec.rollout import CachePolicy
from millrace.weights.phases import Phase, PublicationId, PublicationState
from millrace.weights.plans.gather_broadcast import gather_broadcast
from millrace.weights.plans.sharded import ShardedPlan
from millrace.weights.plans.wire_layouts import Planner
from millrace.wire.v1 import rollout_pb2, weights_pb2
from services.rollout.engine import Engine, Reception, Swap
from services.rollout.weights.sibling_copies import Copies, Source
from services.rollout.weights.transfer_request import NO_PLAN, KnownPlan, TransferRequest

log = structlog.get_logger(__name__)
UNFINISHED = (Phase.PREPARE, Phase.TRANSFER, Phase.VERIFY)


class Receiver:
    """One replica's state in publications, for one job on one engine.

    `on_version` is called with the version that is served from now on, or None where a commit failed half-way and
    nothing may be served.
    """

    def __init__(
        self,
        engine: Engine,
        member_id: MemberId,
        cache_policy: CachePolicy,
        on_version: Callable[[Version | None], None],
    ) -> None:
        self._engine = engine
        self._member_id = member_id
        self._cache_policy = cache_policy
        self._on_version = on_version
        self._state = PublicationState()
        self._preparing: PublicationId | None = None
        self._called_off: PublicationId | None = None
        """Aborted while it was being prepared."""
        self._aborting: PublicationId | None = None
        """Its bytes are gone, or on the way to be."""
        self._committing: PublicationId | None = None
        self._closed = False
        self._turn = asyncio.Lock()
        self._held: Source | None = None
        self.copies = Copies(engine, member_id, self._turn, self._source)
        """Of what is served, to siblings."""
        self._transfer_request: TransferRequest | None = None
        self._plan_hash = b""
        self._known = NO_PLAN
        self._planner = Planner()
        self._sharded: ShardedPlan | None = None
        self._prepare_s = 0.0
        self._reception: Reception | None = None
        self._report = weights_pb2.MemberReport()
        self._deadline: asyncio.TimerHandle | None = None
        self._expiry: asyncio.Task[None] | None = None

    async def prepare(self, request: rollout_pb2.PrepareReceiveRequest) -> bytes:
        """Checks manifest and plan; answers the plan's hash, or nothing where the request only names a plan that is not
        known here."""
        publication, started = PublicationId.from_proto(request.publication), time.perf_counter()
        self._state.advance(publication, Phase.PREPARE)
        await self._cut_short(publication)
        async with self._turn:
            if self._closed:
                raise InvalidState(f"{self._member_id} has left this job.", "look at what it serves: GET /v1/fleet.")
            state = self._state.advance(publication, Phase.PREPARE)
            if state is self._state:
                return self._plan_hash
            if self._state.phase in UNFINISHED:
                self._state = self._state.fail()
            transfer_request = TransferRequest.from_request(request, self._known)
            if transfer_request is None:
                return b""
            self._preparing = publication
            try:
                await self.copies.give_way(publication)
                self._plan_hash = self._agreed_plan(request, transfer_request)
                transfer_request = replace(transfer_request, plan_hash=self._plan_hash)
                self._known = KnownPlan.of(transfer_request)
                await self._engine.prepare(transfer_request)
                if self._closed or self._called_off == publication:
                    await self._engine.abort_receive()
                    raise PublicationFailed(f"publication {publication.key} was aborted while it was prepared.")
            finally:
                self._preparing = None
            self._state, self._transfer_request = state, transfer_request
            self._prepare_s = time.perf_counter() - started
            self._expire_after(request.deadline_s, publication)
            return self._plan_hash

    async def transfer(self, publication: PublicationId) -> None:
        async with self._turn:
            state = self._state.advance(publication, Phase.TRANSFER)
            if state is not self._state:
                await self._engine.begin_receive()
                self._state = state

    async def verify(self, publication: PublicationId, checksums: tuple[int, ...]) -> None:
        """Raises PublicationFailed where bytes did not come or differ; the old version goes on being served."""
        async with self._turn:
            state = self._state.advance(publication, Phase.VERIFY)
            if state is self._state:
                return
            try:
                self._reception = await self._engine.received()
                if self._sharded is not None:
                    self._compare_contents(self._sharded, self._reception.contents, checksums)
                else:
                    self._compare(self._reception.checksums, checksums)
            except PublicationFailed as error:
                self._state = self._state.fail()
                await self._drop()
                raise self._ours(error) from error
            self._state = state

    async def commit(self, publication: PublicationId) -> weights_pb2.MemberReport:
        async with self._turn:
            state = self._state.advance(publication, Phase.COMMIT)
            if state is self._state:
                return self._report
            if self._aborting == publication:
                raise PublicationFailed(f"publication {publication.key} was aborted before its commit.")
            self._stop_clock()
            self._committing, whole = publication, False
            try:
                swap = await self._engine.commit(publication.version, self._cache_policy)
                whole = True
            except PublicationFailed as error:
                raise self._ours(error) from error
            finally:
                self._committing = None
                self._state = state if whole else self._state.fail()
                self._hold(publication if whole else None)
            self._report = self._reported(swap)
            log.info("version committed", version=publication.version, pause_s=round(swap.pause_s, 4))
            return self._report

    async def abort(self, publication: PublicationId, reason: str) -> None:
        """Idempotent; a publication other than the one under way is not touched, and a COMMIT is waited for."""
        if publication == self._preparing:
            self._called_off = publication
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

    async def _drop(self) -> None:
        """Forgets what was coming. Where some of it was put in place already, nothing can be served any more."""
        half_written = self._engine.half_written
        await self._engine.abort_receive()
        if half_written:
            self._hold(None)

    def _hold(self, publication: PublicationId | None) -> None:
        """What is in place from now on, if it is a whole version."""
        self._held = None
        if publication is not None and self._transfer_request is not None:
            self._held = Source(publication, self._transfer_request.manifest)
        self._on_version(publication.version if publication is not None else None)

    def _source(self) -> Source | None:
        """What is served, unless a publication is about to change it."""
        return None if self._state.phase in UNFINISHED else self._held

    async def close(self) -> None:
        """Forgets an unfinished publication, and ends a copy. Nothing may come after this."""
        self._closed = True
        await self.copies.close()
        if self._state.publication is not None:
            await self.abort(self._state.publication, "the replica serves something else")
        async with self._turn:  # one that was being prepared ends by itself
            self._stop_clock()

    async def _cut_short(self, newer: PublicationId) -> None:
        current = self._state.publication
        if current is not None and current != newer:
            await self.abort(current, f"{newer.key} begins")

    def _agreed_plan(self, request: rollout_pb2.PrepareReceiveRequest, transfer_request: TransferRequest) -> bytes:
        if request.path not in (weights_pb2.PATH_GATHER_BROADCAST, weights_pb2.PATH_SHARDED):
            raise InvalidState(f"this replica knows no path {request.path}.", "run the same release everywhere.")
        if request.receiver.world_size != self._engine.world_size:
            what = f"{self._member_id} has {self._engine.world_size} workers, not {request.receiver.world_size}."
            raise PublicationFailed(what, "configure it again.", (self._member_id,))
        self._sharded = None
        if transfer_request.sides is not None:
            self._sharded = self._planner.plan(transfer_request.manifest, transfer_request.sides)
        plan = self._sharded or gather_broadcast(transfer_request.manifest, transfer_request.world_size)
        if request.plan_hash and plan.hash != request.plan_hash:
            what = f"{self._member_id} plans {plan.hash.hex()[:12]}, the sender {request.plan_hash.hex()[:12]}."
            raise PublicationFailed(what, "run the same release of millrace everywhere.", (self._member_id,))
        return plan.hash

    def _compare(self, got: tuple[int, ...], sent: tuple[int, ...]) -> None:
        names = [t.name for t in self._transfer_request.manifest.tensors] if self._transfer_request else []
        if len(sent) != len(names):
            raise PublicationFailed(f"the sender has {len(sent)} checksums for {len(names)} tensors.")
        if wrong := [n for n, a, b in zip(names, got, sent, strict=True) if a != b]:
            what = f"{len(wrong)} tensors arrived at {self._member_id} changed: {', '.join(wrong[:5])}."
            raise PublicationFailed(what, "publish again; where it repeats, look at the network and the memory.")

    def _compare_contents(self, plan: ShardedPlan, got: tuple[tuple[int, int], ...], sent: tuple[int, ...]) -> None:
        first = self._transfer_request.first_rank if self._transfer_request else 0
        expected = sorted(c for i in range(self._engine.world_size) for c in plan.contents_of(first + i).tolist())
        if len(sent) != len(plan.sizes) or sorted(content for content, _ in got) != expected:
            what = f"{self._member_id} got {len(got)} messages of {len(expected)}, {len(sent)} checksums."
            raise PublicationFailed(what, "run the same release of millrace everywhere.")
        if wrong := [content for content, value in got if value != sent[content]]:
            numbers = sorted({int(n) for content in wrong for n in plan.pieces.tensor[plan.pieces_in(content)]})
            names = (
                ", ".join(self._transfer_request.manifest.tensors[n].name for n in numbers[:5])
                if self._transfer_request
                else ""
            )
            what = f"{len(wrong)} messages arrived at {self._member_id} changed, with parts of {names}."
            raise PublicationFailed(what, "publish again; where it repeats, look at the network and the memory.")

    def _ours(self, error: PublicationFailed) -> PublicationFailed:
        """The same, with this member as the culprit where nobody is named."""
        return PublicationFailed(error.what, error.fix, error.culprits or (self._member_id,))

    def _reported(self, swap: Swap) -> weights_pb2.MemberReport:
        got = self._reception
        return weights_pb2.MemberReport(
            member_id=self._member_id,
            bytes=self._bytes(),
            prepare_s=self._prepare_s,
            wire_s=got.wire_s if got else 0.0,
            verify_s=(got.checksum_s if got else 0.0) + swap.compare_s,
            apply_s=swap.apply_s,
            pause_s=swap.pause_s,
            loader_tensors=swap.loader_tensors,
            loader_bytes=swap.loader_bytes,
            staging_bytes=swap.staging_bytes,
            mode=swap.mode,
            loader_names=swap.loader_names,
        )

    def _bytes(self) -> int:
        """That came to this replica."""
        if self._transfer_request is None or self._sharded is None:
            return self._transfer_request.manifest.bytes if self._transfer_request else 0
        first, last = self._transfer_request.first_rank, self._transfer_request.first_rank + self._engine.world_size
        return int(self._sharded.ingress()[first:last].sum())

    def _expire_after(self, seconds: float, publication: PublicationId) -> None:
        """Gives the publication up after `seconds`, whether or not anybody asks for it again."""

        def expire() -> None:
            reason = f"not committed within {seconds:g} s"
            self._expiry = asyncio.create_task(self.abort(publication, reason))

        self._stop_clock()
        self._deadline = asyncio.get_running_loop().call_later(seconds, expire)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

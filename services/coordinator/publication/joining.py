"""Replicas on their way from registration to their first lease: configured in the background, then given the weights.
Those of other pools than `rollout` are configured only.

Replicas that serve the version before the last publication are served by the job's loop. This module looks after those
that came late, failed, or lost their weights.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence

import structlog

from millrace import events
from millrace.contracts.methods import RolloutRpc, ScoringRpc
from millrace.contracts.v1 import rollout_pb2
from millrace.errors import InvalidJob, MillraceError, Mistake, PublicationFailed, Unavailable
from millrace.ids import MemberId, Version
from millrace.spec.pool import ROLLOUT
from millrace.telemetry.spans.context import TraceContext, within
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import span
from millrace.wire.enums import missing_of
from services.coordinator.fleet.partition import Partition, Trainer
from services.coordinator.observe.events import Events
from services.coordinator.publication.publisher import Publisher
from services.coordinator.publication.transfer_setup import SiblingCannotSend
from services.coordinator.state.bell import waited
from services.coordinator.state.job import JobRecord
from services.coordinator.state.member import Configured, Member, Unconfigured, Weights
from services.coordinator.store import Store

log = structlog.get_logger(__name__)
LOOK_EVERY_S = 1.0
GATHER_S = 0.05
"""Changes of the fleet within this time are looked at together: each look costs as much as there are replicas."""


class Joining:
    """Serves one job. `run()` does not return by itself; cancelling it cancels the configurations in progress."""

    def __init__(
        self, job: JobRecord, store: Store, fleet: Partition, trainer: Trainer, publisher: Publisher, events: Events
    ) -> None:
        self.job = job
        """The job's record, which the loop replaces with every version."""
        self._fleet = fleet
        self._trainer = trainer
        self._publisher = publisher
        self._events = events
        self._failed_siblings: dict[MemberId, Version] = {}
        """Siblings that failed to copy, and which version."""
        pools = (ROLLOUT, *(pool.name for pool in job.spec.pools))
        self._configuring = [Configuring(job, pool, store, fleet, events, self._context) for pool in pools]

    async def run(self) -> None:
        """Configures new replicas and gives them the weights, until it is cancelled. Raises InvalidJob if every
        replica of a pool refuses the job."""
        for configuring in self._configuring:
            await configuring.begin()
        catching_up: asyncio.Task[None] | None = None
        await self._fleet.recall(self.job.id, self.job.spec_digest)
        try:
            while True:
                ring = self._fleet.bell.next()
                for configuring in self._configuring:
                    configuring.look()
                if catching_up is not None and catching_up.done():
                    catching_up = catching_up.result()
                if catching_up is None and self._without_weights():
                    catching_up = asyncio.create_task(self._catch_up())
                if await waited(ring, LOOK_EVERY_S):
                    await asyncio.sleep(GATHER_S)
        finally:
            for configuring in self._configuring:
                configuring.cancel()
            if catching_up is not None:
                catching_up.cancel()

    def _without_weights(self) -> list[Member]:
        return [m for m in self._fleet.ready_for(self.job.id) if not self._has_weights(m) and m.due]

    def _has_weights(self, member: Member) -> bool:
        """Whether the member has weights of this job, possibly of the version before."""
        held = member.weights
        return held is not None and (held.job_id, held.lineage) == (self.job.id, self.job.lineage)

    def _context(self) -> TraceContext:
        """The trace of the step in progress, or of the start of the job."""
        step = self.job.step
        return TraceContext.of_step(self.job.id, self.job.lineage, step + 1 if step else 0)

    async def _catch_up(self) -> None:
        """Gives the current version to replicas without weights: from a sibling, or else from the trainer between its
        steps."""
        if self._publisher.publishing:
            return  # it may be on its way to them
        with span(SpanKind.PUBLISH, detail="joining", parent=self._context(), at_least_s=0.001):
            if not await self._copy_from_sibling():
                await self._publish_from_trainer()

    async def _copy_from_sibling(self) -> bool:
        """Whether nothing is left for the trainer: the copy is made, a publication came first, or nobody needs it."""
        job, late = self.job, self._without_weights()
        if (sibling := self._sibling(job, late)) is None:
            return not late
        await self._announce(late, sibling.id)
        try:
            await self._publisher.copy(job, sibling, late)
            self._fleet.bell.ring()
        except (PublicationFailed, SiblingCannotSend) as error:
            self._failed_siblings[sibling.id] = job.version
            log.warning("no copy from a sibling", sibling=sibling.id, error=str(error))
            return False
        return True

    def _sibling(self, job: JobRecord, late: list[Member]) -> Member | None:
        """The replica that copies to `late`: one that serves the current version."""
        current = Weights(job.id, job.lineage, job.version)
        able = [m for m in self._fleet.ready_for(job.id) if m.holds(current)]
        return best_sibling([m for m in able if self._failed_siblings.get(m.id) != job.version], late)

    async def _publish_from_trainer(self) -> None:
        async with self._trainer.turn:
            job, late = self.job, self._without_weights()
            if not late or self._trainer.holds != (job.id, job.version):
                return
            await self._announce(late, self._trainer.member.id)
            try:
                await self._publisher.publish(job, late)
            except PublicationFailed as error:
                for member in late:
                    await self._fleet.cut(member, "it could not be brought the weights")
                log.warning("catch-up failed", members=[m.id for m in late], error=str(error))
            self._fleet.bell.ring()

    async def _announce(self, late: list[Member], sender: str) -> None:
        message = f"{', '.join(m.id for m in late)} gets version {self.job.version} from {sender}"
        payload = events.MemberJoining(members=[m.id for m in late], sender=sender)
        await self._events.add(self.job.id, payload, message)


def best_sibling(able: Sequence[Member], late: Sequence[Member]) -> Member | None:
    """The replica of `able` that copies to `late`: one with their dtype, if possible with the same engine, then on the
    host of one of them, and the least busy of these. None if there is none, or if their dtypes differ."""
    wanted = {(m.configured.dtype, m.engine) for m in late if m.configured}
    if len({dtype for dtype, _ in wanted}) != 1:
        return None
    hosts, dtype = {m.host for m in late}, _dtype(late[0])
    return min(
        (m for m in able if _dtype(m) == dtype),
        key=lambda m: ((_dtype(m), m.engine) not in wanted, m.host not in hosts, m.pulse.running),
        default=None,
    )


def _dtype(member: Member) -> str:
    return member.configured.dtype if member.configured else ""


REFUSED_RETRY_S = 60.0
"""After this time a replica that refused the job is asked again: what was missing on its host may be there by then."""
ACCEPTED = "accepted"
"""Names the note with the digest of the spec that a replica has accepted."""


class Configuring:
    """Serves one job and one pool, between `begin` and `cancel`."""

    def __init__(
        self,
        job: JobRecord,
        pool: str,
        store: Store,
        fleet: Partition,
        events: Events,
        context: Callable[[], TraceContext],
    ) -> None:
        """`context`: the trace of which calls of replicas are a part."""
        self._context = context
        self._job = job
        self._pool = pool
        self._records = store.records(job.id)
        self._deaths = store.deaths(job.id)
        self._fleet = fleet
        self._events = events
        self._note = ACCEPTED if pool == ROLLOUT else f"{ACCEPTED}.{pool}"
        self._accepted = False
        """Whether a replica has accepted the job with this spec, now or before a restart of the coordinator."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        self._accepted = await self._records.note(self._note) == self._job.spec_digest

    def look(self) -> None:
        """Begins to configure the replicas that need it. Raises InvalidJob if every replica refuses the job."""
        for finished in [task for task in self._tasks if task.done()]:
            self._tasks.remove(finished)
            finished.result()
        self._check_refusals()
        for member in [m for m in self._fleet.pool(self._pool) if self._needs_configuration(m)]:
            member.configuring = True
            self._tasks.add(asyncio.create_task(self._configure(member)))

    def cancel(self) -> None:
        """Cancels the configurations in progress."""
        for task in self._tasks:
            task.cancel()

    def _needs_configuration(self, member: Member) -> bool:
        if member.configuring or member.ready_for(self._job.id) or not member.due:
            return False
        refusal = self._refusal(member)
        return refusal is None or time.monotonic() - refusal.at > REFUSED_RETRY_S

    def _refusal(self, member: Member) -> Unconfigured | None:
        found = member.failed_at(self._job.id, self._job.spec_digest)
        return found if found is not None and found.refused else None

    def _check_refusals(self) -> None:
        """Raises InvalidJob if every connected replica has refused the job, and none ever accepted it, or took its
        weights. While replicas are still joining the fleet, the next one may accept it."""
        replicas = self._fleet.pool(self._pool)
        refusals = [refusal for member in replicas if (refusal := self._refusal(member)) is not None]
        if not replicas or len(refusals) < len(replicas):
            return
        if self._accepted and not any(refusal.of_weights for refusal in refusals):
            return
        if time.time() - max(member.joined_s for member in replicas) >= self._fleet.patience.lost_after_s:
            raise _refused_by_all([refusal.error for refusal in refusals], self._pool)

    async def _configure(self, member: Member) -> None:
        job = self._job
        request = rollout_pb2.ConfigureRolloutRequest(job_id=job.id, spec=job.spec_for_members, epoch=self._fleet.epoch)
        method = RolloutRpc.Configure if self._pool == ROLLOUT else ScoringRpc.Configure
        started = time.monotonic()
        try:
            who = f"{member.id} ({member.engine}, {member.device})"
            message = f"{who} joins{_for_pool(self._pool)} from {member.host}; its engine gets ready"
            joined = events.MemberJoined(member=member.id, epoch=self._fleet.epoch, pool=self._pool)
            await self._events.add(job.id, joined, message)
            with within(self._context()):
                answer = await self._fleet.call(member, method, request)
        except MillraceError as error:
            await self._configuration_failed(member, error)
        else:
            await self._accept()
            missing = missing_of(answer.missing_boundaries)
            made = Configured(job.id, answer.world_size, answer.dtype, job.spec_digest, answer.has_base, missing)
            await self._fleet.configured(member, made)
            message = f"{member.id} ({member.engine}) is ready for the job after {time.monotonic() - started:.1f} s"
            payload = events.MemberConfigured(
                member=member.id,
                engine=member.engine,
                pool=self._pool,
                kept_engine=answer.kept_engine,
                engine_changes=list(answer.engine_changes),
            )
            message += _about_engine(payload)
            await self._events.add(job.id, payload, message)
        finally:
            member.configuring = False
            self._fleet.bell.ring()

    async def _configuration_failed(self, member: Member, error: MillraceError) -> None:
        """A replica that refuses the job as invalid stays in the fleet; any other failure takes it out of service, and
        is charged to the job as a death is."""
        job, refused = self._job, isinstance(error, InvalidJob)
        failed = Unconfigured(job.id, job.spec_digest, error, refused)
        if refused:
            await self._fleet.refused(member, failed)
            message = f"{member.id} refused {job.id}: {error}"
        else:
            member.unconfigured = failed
            await self._fleet.cut(member, "it could not be configured")
            if not member.gone.is_set():  # otherwise it is charged as a death
                keep = self._deaths.guess if isinstance(error, Unavailable) else self._deaths.say
                await keep(member.id, str(error))
                await self._deaths.charge(member.place, f"{member.id} {member.failures}")
            message = f"{member.id} could not be configured for {job.id}: {error}"
        event = events.MemberFailed(member=member.id, refused=refused, pool=self._pool)
        await self._events.add(job.id, event, message)

    async def _accept(self) -> None:
        if not self._accepted:
            self._accepted = True
            await self._records.set_note(self._note, self._job.spec_digest)


def _about_engine(configured: events.MemberConfigured) -> str:
    if configured.kept_engine:
        return "; it keeps its engine"
    if configured.engine_changes:
        return f"; it started another engine, as the job before had other {', '.join(configured.engine_changes)}"
    return ""


def _for_pool(pool: str) -> str:
    return "" if pool == ROLLOUT else f" the pool {pool}"


def _refused_by_all(errors: Sequence[MillraceError], pool: str) -> InvalidJob:
    """One error with the words of all replicas, each distinct text once."""
    of_pool = "" if pool == ROLLOUT else f" of the pool {pool}"
    who = f"all {len(errors)} connected replicas{of_pool}"
    if len(errors) == 1:
        who = f"the only connected replica{of_pool}"
    counts = Counter((error.what, error.fix) for error in errors)
    if len(counts) == 1:
        return InvalidJob(f"{who} refused the job: {errors[0].what}", errors[0].fix)
    mistakes = [
        Mistake("", f"{count} of {len(errors)}: {what.removesuffix('.')}", fix) for (what, fix), count in counts.items()
    ]
    return InvalidJob.of(mistakes, f"{who} refused the job:")

"""Replicas on their way from registration to their first lease: configured in the background, then given the weights.
Those of other pools than `rollout` are configured only.

Replicas that serve the version before the last publication are served by the job's loop. This module looks after those
that came late, failed, or lost their weights.
"""

import asyncio
from collections.abc import Sequence

import structlog

from millrace import events
from millrace.errors import PublicationFailed
from millrace.ids import MemberId, Version
from millrace.spec.pool import ROLLOUT
from millrace.telemetry.spans.context import TraceContext
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import span
from services.coordinator.fleet.partition import Partition
from services.coordinator.fleet.trainer import Trainer
from services.coordinator.observe.events import Events
from services.coordinator.publication.configuring import Configuring
from services.coordinator.publication.publisher import Publisher
from services.coordinator.publication.transfer_setup import SiblingCannotSend
from services.coordinator.state.bell import waited
from services.coordinator.state.job import JobRecord
from services.coordinator.state.member import Member, Weights
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

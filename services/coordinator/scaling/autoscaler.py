"""Autoscaling of one pool: measures it, decides, reports why, and asks the scaler."""

import asyncio
import time
from dataclasses import dataclass, field

import structlog

from millrace import events
from millrace.errors import InvalidState, MillraceError
from millrace.ids import JobId
from millrace.local.state_folder import span
from millrace.rest import MemberState
from millrace.spec.pool import ROLLOUT
from millrace.telemetry.metrics.prometheus import coordinator as names
from services.coordinator.scaling.decision import Decision, Limits, Pace, Seen, State, decide
from services.coordinator.scaling.figures import Figures, Look
from services.coordinator.scaling.scalers import Scaler
from services.coordinator.stages.run import Components
from services.coordinator.state.member import Member

log = structlog.get_logger(__name__)
LOOK_S = 1.0
FIRST_RETRY_S = 5.0
LONGEST_RETRY_S = 300.0
"""Longest wait before a scaler is asked again for what it did not do."""
MOST_REPLICAS = 1024


@dataclass(frozen=True)
class Scaling:
    """How a pool is scaled."""

    limits: Limits
    pace: Pace = field(default_factory=Pace)


def limits(text: str, price: float, budget: float) -> Limits:
    """The limits of `MIN:MAX`. Raises InvalidState for anything else."""
    numbers = span(text, MOST_REPLICAS)
    if ":" not in text or numbers is None or numbers[1] == 0:
        what = f"--autoscale: {text!r} is not MIN:MAX."
        raise InvalidState(what, f"write two numbers of replicas, the first at most the second, up to {MOST_REPLICAS}.")
    if budget and not price:
        raise InvalidState("--replica-budget: has no --replica-price.", "give the price of one replica and hour.")
    return Limits(*numbers, price, budget or float("inf"))


class Autoscaler:
    """Scales one pool until cancelled."""

    def __init__(self, components: Components, scaler: Scaler, scaling: Scaling, pool: str = ROLLOUT) -> None:
        self._components, self._scaler, self._scaling, self._pool = components, scaler, scaling, pool
        self._figures = Figures(scaling.pace.down_s)
        self._state: State | None = None
        self._job: JobId | None = None
        self._asked_at, self._retry_s = 0.0, 0.0

    async def run(self) -> None:
        """Looks once a second. An error of the scaler is logged, and it is asked again later."""
        while True:
            try:
                async with self._components.store.connection.outlasted():
                    await self._look()
            except MillraceError as error:
                log.warning("replicas cannot be scaled", pool=self._pool, error=str(error))
                await asyncio.sleep(FIRST_RETRY_S)
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        scaling, now = self._scaling, time.monotonic()
        if self._state is None:
            self._state = State.of(await self._scaler.current(), now)
        look = await look_at(self._components, now, self._pool)
        if look.job != self._job:
            self._job, self._state = look.job, self._state.forget()
        self._figures.add(look)
        seen, long = (self._figures.seen(seconds) for seconds in (scaling.pace.up_s, scaling.pace.down_s))
        self._state, decision = decide(self._state, seen, long, scaling.limits, scaling.pace)
        registry = self._components.prometheus.registry
        names.REPLICAS_WANTED.on(registry).labels(pool=self._pool).set(self._state.wanted)
        names.REPLICAS_READY.on(registry).labels(pool=self._pool).set(look.ready)
        if decision is not None:
            await self._tell(decision, seen, look.job)
            self._asked_at = self._retry_s = 0.0
        await self._reach(self._state.wanted, now)

    async def _tell(self, decision: Decision, seen: Seen, job: JobId | None) -> None:
        names.SCALINGS.on(self._components.prometheus.registry).labels(pool=self._pool, reason=decision.reason).inc()
        message = f"{decision.wanted} replicas are wanted instead of {decision.before}: {decision.message}"
        if job is None:
            log.info(message, pool=self._pool)
            return
        event = events.ReplicasScaled(
            pool=self._pool,
            before=decision.before,
            wanted=decision.wanted,
            reason=decision.reason,
            ready=seen.ready,
            trainer_waits=seen.wait,
            replicas_busy=seen.busy,
        )
        await self._components.events.add(job, event, message)

    async def _reach(self, wanted: int, now: float) -> None:
        """Asks the scaler for what is missing, less and less often."""
        if now < self._asked_at + self._retry_s:
            return
        if await self._scaler.current() == wanted:
            self._asked_at, self._retry_s = now, FIRST_RETRY_S
            return
        self._asked_at, self._retry_s = now, min(LONGEST_RETRY_S, max(FIRST_RETRY_S, 2 * self._retry_s))
        await self._scaler.set(wanted)


async def look_at(components: Components, now: float, pool: str = ROLLOUT) -> Look:
    """A pool of a partition as it is at `now`, in seconds of a steady clock."""
    running, members = components.queue.running_job, components.fleet.pool(pool)
    job = running.weights.job_id if running is not None else None
    ready = [m for m in members if m.state is MemberState.SERVING or job is None]
    counts = await components.store.prompts(job).counts() if job is not None else None
    return Look(
        at=now,
        job=job or (components.turn.job.id if components.turn.job is not None else None),
        step=running.weights.version if running is not None else 0,
        waits=running is not None and not components.trainer.turn.locked(),
        ready=len(ready),
        busy=sum(_running(m) > 0 for m in ready),
        running=sum(map(_running, ready)),
        fullest=max(map(_running, ready), default=0),
        coming=len(members) - len(ready),
        prompts=counts.queued - counts.waiting + counts.leased if counts is not None else 0,
    )


def _running(member: Member) -> int:
    """Samples that its engine generates."""
    return member.pulse.running + member.pulse.waiting

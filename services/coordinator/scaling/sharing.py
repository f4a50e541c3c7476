"""Replicas that running jobs share: how many each of them should have, and which replica goes from one to another.

Jobs run at the same time in partitions of their own. A replica that was started for no partition may work in any: it is
handed over where another job is due more. What a job is due follows from its share and from what it has work for,
which is decided as the autoscaler does. Hand-overs have a distance in time, and ties stay as they are, so that no
replica goes to and fro: each hand-over costs the weights of the new job, and an engine where the jobs need different
ones.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog

from millrace import events
from millrace.events import HandOverReason
from millrace.ids import JobId, MemberId
from millrace.rest import JobState
from services.coordinator.scaling.autoscaler import LOOK_S, look_at
from services.coordinator.scaling.decision import Limits, Pace, State, decide
from services.coordinator.scaling.figures import Figures
from services.coordinator.stages.run import Components, Shared
from services.coordinator.state.job import JobRecord
from services.coordinator.state.member import Member

log = structlog.get_logger(__name__)
MEASURED = 10.0
"""Distances of hand-overs for which a job is measured before fewer replicas count as enough for it."""
REMEMBERED = 60.0
"""Distances of hand-overs for which it is remembered that fewer were not enough."""


@dataclass(frozen=True)
class Claim:
    """A running job and its replicas."""

    place: str
    """The partition of the job."""
    share: float
    replicas: int
    """Replicas that work in its partition."""
    free: int
    """Replicas of them that may be handed over."""
    wanted: int
    """Replicas that it has work for."""


@dataclass(frozen=True)
class Move:
    """Replicas that are due elsewhere."""

    before: str
    partition: str
    count: int
    reason: HandOverReason


def due(claims: Sequence[Claim], spare: int, *, by_demand: bool = True) -> dict[str, int]:
    """How many replicas each place is due, of those that the jobs have and `spare` ones more. Each job is due one, and
    those that may not go away. The others are given one after another, by the method of Webster: the next one to the
    job with the smallest (2 n + 1) / share, where n is what it is due so far, of those that have work for more. Ties
    go to the job that has more replicas now."""
    given = {claim.place: max(1, claim.replicas - claim.free) for claim in claims}
    for _ in range(sum(claim.replicas for claim in claims) + spare - sum(given.values())):
        more = [claim for claim in claims if by_demand and given[claim.place] < claim.wanted] or claims
        first = min(more, key=lambda c: ((2 * given[c.place] + 1) / c.share, -c.replicas, c.place))
        given[first.place] += 1
    return given


def moves(claims: Sequence[Claim], idle: Mapping[str, int], *, ripe: bool) -> list[Move]:
    """What is handed over now. `idle`: free replicas of places without a job. A job without replicas gets one at once.
    Everything else waits until it is `ripe`: until the last hand-over is long enough ago."""
    if not claims:
        return []
    targets = due(claims, sum(idle.values()))
    surplus = {claim.place: min(claim.replicas - targets[claim.place], claim.free) for claim in claims}
    if (bare := next((claim for claim in claims if not claim.replicas), None)) is not None:
        able = [claim for claim in claims if claim.free and claim.replicas > 1]
        richest = max(able, key=lambda claim: surplus[claim.place]).place if able else ""
        before = next((place for place, count in idle.items() if count), richest)
        return [Move(before, bare.place, 1, HandOverReason.FIRST)] if before else []
    if not ripe:
        return []
    by_share, found = due(claims, sum(idle.values()), by_demand=False), list[Move]()
    givers = {place: count for place, count in (*idle.items(), *surplus.items()) if count > 0}
    have = {claim.place: claim.replicas for claim in claims}
    for claim in sorted(claims, key=lambda claim: claim.replicas - targets[claim.place]):
        missing = targets[claim.place] - claim.replicas
        for before in [place for place, count in givers.items() if count]:
            if (count := min(missing, givers[before])) > 0:
                shared = before in idle or have[before] > by_share[before]
                reason = HandOverReason.SHARE if shared else HandOverReason.DEMAND
                found.append(Move(before, claim.place, count, reason))
                missing, givers[before] = missing - count, givers[before] - count
    return found


@dataclass
class Need:
    """What is known of the need of one running job."""

    job: JobId
    figures: Figures
    state: State
    most: int
    """Replicas that there are. A job has work for all of them until something else was measured."""
    why: str = ""
    """Why it wants that many."""


@dataclass
class Sharing:
    """Hands replicas over until cancelled. `every_s`: seconds between two hand-overs, at least."""

    partitions: Mapping[str, Components]
    shared: Shared
    every_s: float
    _needs: dict[str, Need] = field(default_factory=dict)
    _idle_since: dict[str, float] = field(default_factory=dict)
    _refused: set[tuple[MemberId, JobId]] = field(default_factory=set)
    _moved_at: float = field(default_factory=time.monotonic)

    async def run(self) -> None:
        """Looks once a second."""
        while True:
            async with self.shared.store.connection.outlasted():
                await self._look()
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        now = time.monotonic()
        jobs = {job.place: job for job in await self.shared.store.index.active() if job.place in self.partitions}
        self._refused = {(member, job) for member, job in self._refused if job in {each.id for each in jobs.values()}}
        self._needs = {place: need for place, need in self._needs.items() if place in jobs}
        self._idle_since = {p: self._idle_since.get(p, now) for p in self.partitions if p not in jobs}
        await self._take_from_refused(jobs)
        claims, idle = await self._claims(jobs, now), self._idle(now)
        for move in moves(claims, idle, ripe=now - self._moved_at >= self.every_s):
            for _ in range(move.count):
                if (member := self._chosen(move, jobs)) is not None:
                    await self._hand_over(member, move.partition, jobs, move.reason, self._why(move, claims, jobs))

    # What there is.

    async def _claims(self, jobs: Mapping[str, JobRecord], now: float) -> list[Claim]:
        """The claims of the jobs whose trainer is connected."""
        able = {place: job for place, job in jobs.items() if self.partitions[place].fleet.trainer is not None}
        total = sum(len(self._working(place, job)) for place, job in able.items())
        claims = []
        for place, job in able.items():
            working = self._working(place, job)
            wanted = 1 if job.state is JobState.PAUSED else await self._wanted(job, max(1, total), now)
            claims.append(Claim(place, job.share, len(working), sum(not m.home for m in working), wanted))
        return claims

    def _working(self, place: str, job: JobRecord) -> list[Member]:
        """The replicas of a partition without those that refused its job."""
        return [m for m in self.partitions[place].fleet.replicas if (m.id, job.id) not in self._refused]

    def _idle(self, now: float) -> dict[str, int]:
        """Free replicas of partitions that have had no job for a while: a job may follow at once."""
        places = [place for place, since in self._idle_since.items() if now - since >= self.every_s]
        return {place: sum(not m.home for m in self.partitions[place].fleet.replicas) for place in places}

    async def _wanted(self, job: JobRecord, total: int, now: float) -> int:
        """Replicas that the job has work for, of `total`."""
        pace = Pace(self.every_s, MEASURED * self.every_s, REMEMBERED * self.every_s)
        need = self._needs.get(job.place)
        if need is None or need.job != job.id:
            need = self._needs[job.place] = Need(job.id, Figures(pace.down_s), State.of(total, now), total)
        if need.state.wanted >= need.most:
            need.state = replace(need.state, wanted=total)
        need.most = total
        need.figures.add(await look_at(self.partitions[job.place], now))
        seen, long = (need.figures.seen(seconds) for seconds in (pace.up_s, pace.down_s))
        need.state, decision = decide(need.state, seen, long, Limits(1, total), pace)
        if decision is not None:
            need.why = decision.message
        return need.state.wanted

    # Handing over.

    def _chosen(self, move: Move, jobs: Mapping[str, JobRecord]) -> Member | None:
        """The next replica that goes: one without weights, else the one that generates least. One that serves stays
        with a job that has any. None while weights are on their way to or from replicas."""
        components, job = self.partitions[move.before], jobs[move.partition]
        if components.publisher.sending:
            return None
        members = components.fleet.replicas
        able = [m for m in members if not m.home and not m.configuring and (m.id, job.id) not in self._refused]
        if move.before in jobs and sum(m.weights is not None for m in members) <= 1:
            able = [m for m in able if m.weights is None] if len(members) > 1 else []
        return min(
            able, key=lambda m: (m.weights is not None, m.pulse.running + m.pulse.waiting, -m.joined_s), default=None
        )

    async def _take_from_refused(self, jobs: Mapping[str, JobRecord]) -> None:
        """Hands replicas that refused the job of their partition to another one, and to that job no more."""
        for place, job in jobs.items():
            for member in [m for m in self.partitions[place].fleet.replicas if not m.home and not m.configuring]:
                last = member.unconfigured
                if last is None or not last.refused or last.job_id != job.id or member.gone.is_set():
                    continue
                self._refused.add((member.id, job.id))
                others = [p for p, each in jobs.items() if p != place and (member.id, each.id) not in self._refused]
                if others:
                    fewest = min(others, key=lambda p: len(self.partitions[p].fleet.replicas))
                    why = f"it refused {job.id}"
                    await self._hand_over(member, fewest, jobs, HandOverReason.REFUSED, why)

    async def _hand_over(
        self, member: Member, partition: str, jobs: Mapping[str, JobRecord], reason: HandOverReason, why: str
    ) -> None:
        before, self._moved_at = member.partition, time.monotonic()
        await self.shared.whole_fleet.hand_over(member, partition)
        log.info("replica handed over", member=member.id, before=before, partition=partition, reason=reason)
        event = events.MemberHandedOver(member=member.id, before=before, partition=partition, reason=reason)
        message = f"{member.id} goes from the partition {before} to {partition}: {why}"
        for job in [jobs[place] for place in (before, partition) if place in jobs]:
            await self.shared.events.add(job.id, event, message)

    def _why(self, move: Move, claims: Sequence[Claim], jobs: Mapping[str, JobRecord]) -> str:
        job = jobs[move.partition]
        if move.reason is HandOverReason.FIRST:
            return f"{job.id} has no replica"
        if move.reason is HandOverReason.DEMAND:
            other = jobs[move.before]
            need = self._needs.get(move.before)
            why = "it is paused" if other.state is JobState.PAUSED or need is None else need.why
            return f"{other.id} has work for fewer: {why}"
        shares = ", ".join(f"{claim.place} {claim.share:g}" for claim in claims)
        return f"by the shares of the running jobs ({shares}) {job.id} is due more"

"""Which queued job runs in which partition. Pure: the runner of a partition and the views of jobs ask the same."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from millrace.rest.waiting import WaitingFor, WaitingView
from millrace.spec.pool import ROLLOUT
from services.coordinator.state.job import JobRecord
from services.coordinator.state.waiting import NO_TRAINER, Turn


@dataclass(frozen=True)
class Place:
    """A partition, as far as queued jobs depend on it."""

    name: str
    turn: Turn = field(default_factory=Turn)
    has_trainer: bool = False
    pools: Collection[str] = ()
    """Pools with a replica that does not drain, `rollout` among them."""

    def can_run(self, job: JobRecord) -> bool:
        """Whether its members are all that the job needs."""
        return self.has_trainer and {ROLLOUT, *job.pool_names} <= set(self.pools)


@dataclass(frozen=True)
class Quota:
    """How many jobs one user may have active at the same time."""

    jobs_per_user: int = 0
    """0: as many as there are partitions. Jobs without a user are not counted."""

    def spent(self, job: JobRecord, active: Iterable[JobRecord]) -> bool:
        """Whether the user of `job` has as many active jobs as allowed."""
        own = sum(each.user == job.user for each in active)
        return bool(self.jobs_per_user and job.user) and own >= self.jobs_per_user


def places_for(job: JobRecord, places: Sequence[Place]) -> list[Place]:
    """The places where a queued job may run. Those with all members that it needs, if there are any; else it starts
    where a trainer is, and waits there for the others. A job that is continued goes where it ran before, if nothing
    runs there: the trainer may still hold it."""
    if job.wanted_partition:
        return [place for place in places if place.name == job.wanted_partition]
    found = [place for place in places if place.can_run(job)] or [p for p in places if p.has_trainer] or list(places)
    before = [place for place in found if place.name == job.partition and place.turn.running is None]
    return before or found


def next_for(
    name: str, queued: Iterable[JobRecord], active: Sequence[JobRecord], places: Sequence[Place], quota: Quota
) -> JobRecord | None:
    """The queued job that comes next in the partition `name`. Of those that may run there: the one of the highest
    priority; of several the one whose user has the fewest active jobs; of several the one that was submitted first."""
    running = Counter(job.user for job in active)
    fitting = (
        job
        for job in queued
        if not quota.spent(job, active) and any(place.name == name for place in places_for(job, places))
    )
    return min(fitting, key=lambda job: (-job.priority, running[job.user], job.created_s), default=None)


def waits_for_turn(job: JobRecord, places: Sequence[Place], quota: Quota) -> WaitingView | None:
    """What a queued job waits for; None if it is about to start."""
    found = places_for(job, places)
    turns = [place.turn.job for place in found]
    if quota.spent(job, [p.turn.running for p in places if p.turn.running is not None]):
        message = f"{job.user} has as many active jobs as one user may have: {quota.jobs_per_user}"
        return WaitingView(reason=WaitingFor.QUOTA, message=message)
    others = [turn for turn in turns if turn is not None and turn.id != job.id]
    if others and len(others) == len(turns):
        message = f"its turn comes after {others[0].named_for(job)}"
        return WaitingView(reason=WaitingFor.EARLIER_JOB, message=message)
    if not any(place.has_trainer for place in found):
        of = f" to the partition {job.wanted_partition}" if job.wanted_partition else ""
        return WaitingView(reason=WaitingFor.TRAINER, message=f"{NO_TRAINER}{of}")
    return None

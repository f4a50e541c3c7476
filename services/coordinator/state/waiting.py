"""Which queued job comes next in which partition, and what each job waits for, from its record and the partitions.
Pure: the runner of a partition and the views of jobs ask the same."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from millrace.rest import JobState
from millrace.rest.waiting import WaitingFor, WaitingView
from millrace.spec.pool import ROLLOUT
from services.coordinator.state.job import ENDED, JobRecord
from services.coordinator.state.member import Member


@dataclass
class Turn:
    """Whose turn it is in one partition."""

    running: JobRecord | None = None
    """The active job."""
    waiting: JobRecord | None = None
    """The queued job that comes next, while none is active."""

    @property
    def job(self) -> JobRecord | None:
        return self.running or self.waiting

    def over(self) -> None:
        """The active job has ended, or starts again."""
        self.running = self.waiting = None


NO_TRAINER = "no trainer is connected"


def waits_for(job: JobRecord, trainer: Member | None, pools: Mapping[str, Sequence[Member]]) -> WaitingView | None:
    """What a job waits for that is not in the queue; None while it works, or has ended. `trainer` and `pools` are those
    of its partition: the replicas that do not drain, of `rollout` and of the pools of the job."""
    if job.state in ENDED:
        return None
    if job.state is JobState.PAUSED:
        return WaitingView(reason=WaitingFor.RESUME, message=f"it is paused: `millrace resume {job.id}` continues it")
    if trainer is None:
        return WaitingView(reason=WaitingFor.TRAINER, message=NO_TRAINER)
    if trainer.configuring:
        return WaitingView(reason=WaitingFor.TRAINER_LOADING, message=f"{trainer.id} loads the model")
    if (found := _for_replicas(job, pools[ROLLOUT])) is not None:
        return found
    for name, members in pools.items():
        if name != ROLLOUT and not any(member.ready_for(job.id) for member in members):
            return _for_pool(job, name, members)
    return _for_judges(pools[ROLLOUT])


def _for_replicas(job: JobRecord, replicas: Sequence[Member]) -> WaitingView | None:
    if not replicas:
        return WaitingView(reason=WaitingFor.REPLICA, message="no rollout replica is connected")
    if any(m.weights is not None and m.weights.job_id == job.id for m in replicas):
        return None
    failed = [found for m in replicas if (found := m.failed_at(job.id, job.spec_digest)) is not None]
    refused = [each for each in failed if each.refused]
    total, preparing = len(replicas), len(replicas) - len(failed)
    parts = [f"not ready yet: {preparing} of {_replicas(total)}"] if preparing else []
    for how, each in (("refused by", refused), ("could not be made ready:", [f for f in failed if not f.refused])):
        if each:
            parts.append(f"{how} {len(each)} of {_replicas(total)}: {each[0].error}")
    reason = WaitingFor.REPLICAS_REFUSED if len(refused) == total else WaitingFor.REPLICAS_FAILED
    return WaitingView(reason=WaitingFor.REPLICAS_PREPARING if preparing else reason, message="; ".join(parts))


def _for_judges(replicas: Sequence[Member]) -> WaitingView | None:
    """The first judge, by name, that does not answer some of the replicas."""
    outages = [outage for m in replicas for outage in m.pulse.judge_outages]
    if not outages:
        return None
    name = min(outage.name for outage in outages)
    of_judge = [outage for outage in outages if outage.name == name]
    longest = max(of_judge, key=lambda outage: outage.seconds)
    requests = sum(outage.waiting for outage in of_judge)
    where = f"{len(of_judge)} of {_replicas(len(replicas))}"
    message = (
        f"the judge {name} does not answer {where}: {longest.reason}; {requests} requests wait, generation goes on"
    )
    return WaitingView(reason=WaitingFor.JUDGE, message=message)


def _for_pool(job: JobRecord, name: str, members: Sequence[Member]) -> WaitingView:
    if not members:
        fix = f"start one with --pool {name}"
        return WaitingView(reason=WaitingFor.POOL, message=f"no replica of the pool {name} is connected: {fix}")
    failed = [found for m in members if (found := m.failed_at(job.id, job.spec_digest)) is not None]
    why = f": {failed[0].error}" if failed else ""
    message = f"no replica of the pool {name} is ready, of {_replicas(len(members))}{why}"
    return WaitingView(reason=WaitingFor.POOL, message=message)


def _replicas(count: int) -> str:
    return f"{count} replica{'s' if count != 1 else ''}"


@dataclass(frozen=True)
class Place:
    """A partition, as far as queued jobs depend on it."""

    name: str
    turn: Turn = field(default_factory=Turn)
    has_trainer: bool = False
    pools: Collection[str] = ()
    """Pools with a replica that does not drain, `rollout` among them."""
    can_borrow: bool = False
    """Whether a replica of another partition would be handed over to its job."""

    def can_run(self, job: JobRecord, *, borrowing: bool = False) -> bool:
        """Whether its members are all that the job needs; with `borrowing` together with a replica of another
        partition."""
        borrowed = {ROLLOUT} if borrowing and self.can_borrow else set[str]()
        return self.has_trainer and {ROLLOUT, *job.pool_names} <= borrowed.union(self.pools)


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
    """The places where a queued job may run. Those with all members that it needs, if there are any; if all of these
    have jobs, those too that borrow a replica; else it starts where a trainer is, and waits there for the others. A job
    that is continued goes where it ran before, if nothing runs there: the trainer may still hold it."""
    if job.wanted_partition:
        return [place for place in places if place.name == job.wanted_partition]
    found = [place for place in places if place.can_run(job)]
    if all(place.turn.running is not None for place in found):
        found = [place for place in places if place.can_run(job, borrowing=True)]
    found = found or [place for place in places if place.has_trainer] or list(places)
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


@dataclass(frozen=True)
class Preemption:
    """When a job that runs gives way to a queued one of a higher priority that asks for it."""

    after_s: float = 0.0
    """Seconds for which a job runs after each start, at least, before it gives way; 0: none does."""

    def may_stop(self, job: JobRecord, now_s: float) -> bool:
        """Whether the job has run so long, and is further than it was when it started."""
        ran = job.state is JobState.RUNNING and now_s - job.since_s >= self.after_s
        return self.after_s > 0 and ran and job.step > job.started_step


def preempted_by(
    name: str,
    queued: Iterable[JobRecord],
    active: Sequence[JobRecord],
    places: Sequence[Place],
    quota: Quota,
    preemption: Preemption,
    now_s: float,
) -> JobRecord | None:
    """The queued job for which the one that runs in the partition `name` gives way now, at the Unix time `now_s`; None
    if it goes on. That is the next one there, if it asks for it and no partition is free for it. Where several jobs
    could give way, the one with the lowest priority does; of several the one that started last."""
    running = {job.place: job for job in active}
    own = running.get(name)
    if own is None or not preemption.may_stop(own, now_s):
        return None
    found = next_for(name, queued, [job for job in active if job is not own], places, quota)
    if found is None or not found.preempt:
        return None
    fitting = places_for(found, places)
    if any(place.has_trainer and place.name not in running for place in fitting):
        return None
    there = (running[place.name] for place in fitting if place.name in running)
    lower = [job for job in there if job.priority < found.priority and preemption.may_stop(job, now_s)]
    return found if min(lower, key=lambda job: (job.priority, -job.since_s), default=None) is own else None


def waits_for_turn(job: JobRecord, places: Sequence[Place], quota: Quota) -> WaitingView | None:
    """What a queued job waits for; None if it is about to start."""
    found = places_for(job, places)
    turns = [place.turn.job for place in found]
    if quota.spent(job, [p.turn.running for p in places if p.turn.running is not None]):
        message = f"{job.user} has as many active jobs as one user may have: {quota.jobs_per_user}"
        return WaitingView(reason=WaitingFor.QUOTA, message=message)
    others = [turn for turn in turns if turn is not None and turn.id != job.id]
    if others and len(others) == len(turns):
        again = f"{job.gave_way}; " if job.gave_way else ""
        message = f"{again}its turn comes after {others[0].named_for(job)}"
        return WaitingView(reason=WaitingFor.EARLIER_JOB, message=message)
    if not any(place.has_trainer for place in found):
        of = f" to the partition {job.wanted_partition}" if job.wanted_partition else ""
        return WaitingView(reason=WaitingFor.TRAINER, message=f"{NO_TRAINER}{of}")
    return None

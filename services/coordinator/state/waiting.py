"""Whose turn it is, and what a job waits for that has begun, from its record and its partition. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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

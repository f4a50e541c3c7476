"""What a job waits for, from its record, the job whose turn it is, and the fleet. Pure."""

from collections.abc import Mapping, Sequence

from millrace.rest import JobState, WaitingFor, WaitingView
from millrace.spec.pool import ROLLOUT
from services.coordinator.state.job import ENDED, JobRecord
from services.coordinator.state.member import Member


class CurrentJob:
    """The job whose turn it is: the one that runs, or the first in the queue."""

    job: JobRecord | None = None


def waits_for(
    job: JobRecord, turn: JobRecord | None, trainer: Member | None, pools: Mapping[str, Sequence[Member]]
) -> WaitingView | None:
    """What `job` waits for; None while it works, or has ended. `turn` is the job whose turn it is; `pools` are the
    replicas that do not drain, of `rollout` and of the pools of the job whose turn it is."""
    if job.state in ENDED:
        return None
    if job.state is JobState.PAUSED:
        return WaitingView(reason=WaitingFor.RESUME, message=f"it is paused: `millrace resume {job.id}` continues it")
    if job.state is JobState.QUEUED and turn is not None and turn.id != job.id:
        message = f"its turn comes after {turn.named_for(job)}"
        return WaitingView(reason=WaitingFor.EARLIER_JOB, message=message)
    if trainer is None:
        return WaitingView(reason=WaitingFor.TRAINER, message="no trainer is connected")
    if job.state is JobState.QUEUED:
        return None
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

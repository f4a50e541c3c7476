"""What a job waits for, in each state of the fleet."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from millrace.contracts.v1 import fleet_pb2
from millrace.errors import InvalidJob, Unavailable
from millrace.ids import JobId, MemberId, Version
from millrace.rest import JobState, MemberKind, WaitingFor
from millrace.spec.pool import ROLLOUT
from services.coordinator.state.job import ENDED, JobRecord
from services.coordinator.state.member import Configured, Member, Unconfigured, Weights
from services.coordinator.state.waiting import waits_for
from tests.services.coordinator.redis import a_job

ANOTHER = a_job(2)
RUNNING = replace(a_job(1), state=JobState.RUNNING)


def member(kind: MemberKind = MemberKind.ROLLOUT) -> Member:
    return Member(MemberId(f"{kind}-1"), kind, "host:1", "", "vllm", "", 1, "host", "cpu")


def generating(replicas: Sequence[Member]) -> dict[str, Sequence[Member]]:
    return {ROLLOUT: replicas}


TRAINER = member(MemberKind.TRAINER)


def refused(job: JobRecord = RUNNING) -> Member:
    one, why = member(), InvalidJob("reward.function: no module named x.", "install it.")
    one.unconfigured = Unconfigured(job.id, job.spec_digest, why, refused=True)
    return one


def failed() -> Member:
    one = member()
    one.unconfigured = Unconfigured(RUNNING.id, RUNNING.spec_digest, Unavailable("vLLM did not start."), refused=False)
    return one


def with_weights(job_id: JobId = RUNNING.id) -> Member:
    one = member()
    one.configured, one.weights = Configured(job_id, 1, "float32"), Weights(job_id, 0, Version(0))
    return one


def without_judge(name: str, seconds: float, waiting: int) -> Member:
    one = with_weights()
    outage = fleet_pb2.JudgeOutage(name=name, reason=f"down {seconds:g} s", waiting=waiting, seconds=seconds)
    one.pulse = one.pulse.next(fleet_pb2.HeartbeatRequest(judge_outages=[outage]))
    return one


def test_a_job_says_that_its_scores_wait_for_a_judge() -> None:
    replicas = [without_judge("quality", 3, 5), without_judge("quality", 9, 2), without_judge("style", 1, 1)]
    found = waits_for(RUNNING, TRAINER, generating(replicas))
    assert found is not None and found.reason is WaitingFor.JUDGE
    assert found.message == (
        "the judge quality does not answer 2 of 3 replicas: down 9 s; 7 requests wait, generation goes on"
    )
    replicas[0].pulse = replicas[0].pulse.next(fleet_pb2.HeartbeatRequest())
    assert waits_for(RUNNING, TRAINER, generating(replicas[:1])) is None, "the judge answers again"


@pytest.mark.parametrize(
    ("replicas", "reason", "message"),
    [
        ([], WaitingFor.REPLICA, "no rollout replica is connected"),
        ([member()], WaitingFor.REPLICAS_PREPARING, "not ready yet: 1 of 1 replica"),
        ([with_weights(ANOTHER.id)], WaitingFor.REPLICAS_PREPARING, "not ready yet: 1 of 1 replica"),
        (
            [member(), refused()],
            WaitingFor.REPLICAS_PREPARING,
            "not ready yet: 1 of 2 replicas; refused by 1 of 2 replicas: reward.function: no module named x. "
            "Fix: install it.",
        ),
        (
            [refused(), refused()],
            WaitingFor.REPLICAS_REFUSED,
            "refused by 2 of 2 replicas: reward.function: no module named x. Fix: install it.",
        ),
        (
            [failed(), refused(ANOTHER)],
            WaitingFor.REPLICAS_PREPARING,
            "not ready yet: 1 of 2 replicas; could not be made ready: 1 of 2 replicas: vLLM did not start.",
        ),
        ([failed()], WaitingFor.REPLICAS_FAILED, "could not be made ready: 1 of 1 replica: vLLM did not start."),
    ],
)
def test_a_job_without_a_serving_replica_says_why(replicas: list[Member], reason: WaitingFor, message: str) -> None:
    found = waits_for(RUNNING, TRAINER, generating(replicas))
    assert found is not None and (found.reason, found.message) == (reason, message)
    assert waits_for(RUNNING, TRAINER, generating([*replicas, with_weights()])) is None


def test_a_job_waits_for_its_trainer_first() -> None:
    loading = member(MemberKind.TRAINER)
    loading.configuring = True
    nobody = waits_for(RUNNING, None, generating([]))
    assert nobody is not None and nobody.reason is WaitingFor.TRAINER
    found = waits_for(RUNNING, loading, generating([refused()]))
    assert found is not None and found.reason is WaitingFor.TRAINER_LOADING


def test_a_paused_job_waits_for_somebody_and_an_ended_one_for_nothing() -> None:
    found = waits_for(replace(RUNNING, state=JobState.PAUSED), None, generating([]))
    assert found is not None and found.reason is WaitingFor.RESUME and f"millrace resume {RUNNING.id}" in found.message
    assert [waits_for(replace(RUNNING, state=state), None, generating([])) for state in ENDED] == [None] * 3


def test_a_job_waits_for_a_replica_of_each_pool() -> None:
    def waits(*teachers: Member) -> tuple[WaitingFor, str] | None:
        found = waits_for(RUNNING, TRAINER, {**generating([with_weights()]), "teacher": teachers})
        return None if found is None else (found.reason, found.message)

    nobody = "no replica of the pool teacher is connected: start one with --pool teacher"
    assert waits() == (WaitingFor.POOL, nobody)
    assert waits(member()) == (WaitingFor.POOL, "no replica of the pool teacher is ready, of 1 replica")
    why = "vLLM did not start."
    assert waits(failed()) == (WaitingFor.POOL, f"no replica of the pool teacher is ready, of 1 replica: {why}")
    ready = member()
    ready.configured = Configured(RUNNING.id, 1, "float32")
    assert waits(failed(), ready) is None

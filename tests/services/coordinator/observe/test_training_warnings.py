"""Which step metrics a job is warned of, and how often."""

from typing import Any

import pytest

from millrace.rest import WarningCause
from millrace.spec import parse
from millrace.spec.job import JobSpec
from services.coordinator.observe.training_warnings import CHECKS, QUIET_STEPS, found, lasting

HEALTHY = {
    "critic/score/min": 0.0,
    "critic/score/max": 1.0,
    "training/groups_without_signal": 1.0,
    "rollout_corr/k3_kl": 0.02,
    "rollout_corr/k3_kl/same_version": 0.0001,
    "response_length/clip_ratio": 0.1,
}
TROUBLE = {
    WarningCause.EQUAL_REWARDS: {"critic/score/max": 0.0, "training/groups_without_signal": 4.0},
    WarningCause.NO_SIGNAL: {"training/groups_without_signal": 4.0},
    WarningCause.LOGPROB_MISMATCH: {"rollout_corr/k3_kl/same_version": 0.05},
    WarningCause.RESPONSES_CUT: {"response_length/clip_ratio": 1.0},
}


def spec(**algorithm: Any) -> JobSpec:
    """A job of 4 prompts a step."""
    return parse(
        {
            "name": "sums",
            "output": "/out",
            "model": {"path": "/model"},
            "data": {"files": ["/data.jsonl"]},
            "schedule": {"prompts_per_step": 4},
            "algorithm": algorithm,
        }
    )


SPEC = spec()


def told(steps: list[dict[str, float]], of: JobSpec = SPEC) -> list[tuple[int, WarningCause]]:
    """The number of steps so far, and the cause, of every warning."""
    return [(n, event.cause) for n in range(1, len(steps) + 1) for event, _ in found(steps[:n], of)]


def test_every_cause_has_a_check() -> None:
    assert {check.cause for check in CHECKS} == set(TROUBLE)
    assert set(WarningCause) - set(TROUBLE) == {WarningCause.REWARD_FAILURES}, "that one is read from the ledger"


@pytest.mark.parametrize("cause", list(TROUBLE))
def test_trouble_that_lasts_is_told_once_with_its_figure(cause: WarningCause) -> None:
    steps = max(check.steps for check in CHECKS if check.cause is cause)
    bad = HEALTHY | TROUBLE[cause]
    rows = [HEALTHY] * 3 + [bad] * (steps + 40)
    assert told(rows) == [(3 + steps, cause)]
    ((event, message),) = found(rows[: 3 + steps], SPEC)
    assert event.steps == steps and event.metric in bad and f"for {steps} steps" in message
    assert lasting(bad, SPEC) == {cause} and lasting(HEALTHY, SPEC) == set()


def test_the_message_has_the_figure_and_the_likely_cause() -> None:
    ((_, message),) = found([HEALTHY | {"response_length/clip_ratio": 0.97}] * 3, SPEC)
    assert message.startswith("97% of the responses are cut at rollout.max_response_tokens for 3 steps. Likely ")
    ((_, message),) = found([HEALTHY | TROUBLE[WarningCause.EQUAL_REWARDS]] * 3, SPEC)
    assert message.startswith("every reward is 0 for 3 steps. Nothing is learned. Likely the reward function ")


def test_trouble_that_comes_and_goes_is_told_again_only_after_a_quiet_time() -> None:
    bad = HEALTHY | TROUBLE[WarningCause.RESPONSES_CUT]
    soon, late = [HEALTHY] * 5, [HEALTHY] * (QUIET_STEPS + 5)
    cause = WarningCause.RESPONSES_CUT
    assert told([*[bad] * 3, *soon, *[bad] * 3]) == [(3, cause)]
    rows = [*[bad] * 3, *late, *[bad] * 3]
    assert [event.cause for event, _ in found(rows[-QUIET_STEPS:], SPEC)] == [cause]
    assert told([bad, bad, HEALTHY] * 10) == []


def test_groups_of_equal_rewards_are_no_trouble_where_groups_are_not_compared() -> None:
    bad = [HEALTHY | TROUBLE[WarningCause.NO_SIGNAL]] * 5
    assert told(bad) and not told(bad, spec(advantage="remax"))


def test_old_tokens_may_differ_more() -> None:
    """Without tokens of the trainer's own version the divergence has the staleness in it."""
    stale = {name: value for name, value in HEALTHY.items() if name != "rollout_corr/k3_kl/same_version"}
    assert not told([stale | {"rollout_corr/k3_kl": 0.05}] * 3)
    assert told([stale | {"rollout_corr/k3_kl": 0.2}] * 3) == [(3, WarningCause.LOGPROB_MISMATCH)]


def test_a_task_that_is_solved_is_not_a_reward_that_does_not_find_the_answer() -> None:
    def step(low: float, high: float) -> dict[str, float]:
        return HEALTHY | {"critic/score/min": low, "critic/score/max": high, "training/groups_without_signal": 4.0}

    def last(*rows: dict[str, float]) -> str:
        return {told.cause: message for told, message in found(rows, SPEC)}[WarningCause.EQUAL_REWARDS]

    assert "the task is solved" in last(step(0.0, 1.0), *[step(1.0, 1.0)] * 3)
    assert "does not find the answer" in last(*[step(0.0, 0.0)] * 3)
    assert "does not find the answer" in last(step(0.0, 1.0), *[step(0.0, 0.0)] * 3), "it was better before"

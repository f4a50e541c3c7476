"""Metrics of a batch and of held-out prompts, and the row that they go into."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.ids import PromptId, Version
from millrace.spec import JobSpec
from millrace.telemetry.metrics.catalogue import UndeclaredMetric
from services.coordinator.observe.step_metrics import batch_metrics, held_out, step_row, step_seconds
from services.coordinator.state.group import GroupSummary

REWARDS = st.integers(1, 6).flatmap(
    lambda n: st.lists(st.lists(st.floats(-5, 5), min_size=n, max_size=n), min_size=1, max_size=4)
)


@given(REWARDS)
def test_best_and_worst_of_k_are_means_over_all_choices(rewards: list[list[float]]) -> None:
    n = len(rewards[0])
    found = held_out("math", rewards)
    assert found.pop(f"val-core/math/reward/mean@{n}") == pytest.approx(sum(map(sum, rewards)) / len(rewards) / n)
    for k in {2, 4, n} & set(range(2, n + 1)):
        choices = [list(combinations(each, k)) for each in rewards]
        best, worst = (sum(sum(map(of, each)) / len(each) for each in choices) / len(choices) for of in (max, min))
        part = "core" if k == n else "aux"
        assert found.pop(f"val-{part}/math/reward/best@{k}/mean") == pytest.approx(best, abs=1e-9)
        assert found.pop(f"val-aux/math/reward/worst@{k}/mean") == pytest.approx(worst, abs=1e-9)
    assert not found


def test_of_rewards_of_0_and_1_the_best_is_pass_at_k() -> None:
    found = held_out("math", [[1.0, 0.0, 0.0, 0.0], [0.0] * 4])
    assert found["val-core/math/reward/best@4/mean"] == 0.5
    assert found["val-aux/math/reward/best@2/mean"] == pytest.approx(0.25)


def summary(prompt_tokens: int, response_tokens: list[int], rewards: list[float], oldest: list[int]) -> GroupSummary:
    return GroupSummary(
        prompt_id=PromptId("0-0"),
        data_source="math",
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        rewards=rewards,
        oldest=oldest,
        truncated=0,
        generate_s=2.0,
        score_s=0.5,
        member_id="rollout-0",
    )


def test_lengths_rewards_and_staleness_of_a_batch() -> None:
    spec = JobSpec.model_validate(
        {
            "name": "sums",
            "output": "/runs/1",
            "model": {"path": "/models/1"},
            "data": {"procedural": "reasoning_gym:sums", "max_prompt_tokens": 5},
            "rollout": {"max_response_tokens": 8},
            "schedule": {"steps": 1},
        }
    )
    groups = [summary(5, [8, 2], [1.0, 0.0], [3, 4]), summary(3, [8, 8], [0.5, 0.5], [4, 4])]
    found = batch_metrics(groups, Version(4), spec)
    assert (found["critic/score/mean"], found["critic/score/max"], found["critic/score/min"]) == (0.5, 1.0, 0.0)
    assert (found["response_length/mean"], found["response_length/clip_ratio"]) == (6.5, 0.75)
    assert (found["prompt_length/mean"], found["prompt_length/clip_ratio"]) == (4.0, 0.5)
    assert (found["training/staleness/mean"], found["training/groups_without_signal"]) == (0.25, 1.0)
    assert found["perf/total_num_tokens"] == 8 + 2 + 8 + 8 + 2 * 5 + 2 * 3


def test_a_row_keeps_what_it_had_and_refuses_what_nobody_declared() -> None:
    row = step_row(3, {"timing_s/gen": 1.0, "timing_s/train": 3.0}, trainer={"actor/grad_norm": 0.5, "actor/ours": 1.0})
    seconds = step_seconds({**row.values, "perf/total_num_tokens": 80.0}, devices=2)
    values = step_row(3, seconds, earlier=row.values).values
    assert values["training/global_step"] == 3.0 and values["actor/ours"] == 1.0
    assert (values["timing_s/step"], values["perf/time_per_step"], values["perf/throughput"]) == (4.0, 4.0, 10.0)
    with pytest.raises(UndeclaredMetric, match="perf/invented"):
        step_row(3, {"perf/invented": 1.0})
    with pytest.raises(UndeclaredMetric, match="perf/invented"):
        step_row(3, {}, trainer={"perf/invented": 1.0})
    with pytest.raises(UndeclaredMetric, match="owned by the coordinator"):
        step_row(3, {}, trainer={"timing_s/gen": 1.0})
    with pytest.raises(UndeclaredMetric, match="owned by the trainer"):
        step_row(3, {"actor/grad_norm": 1.0})

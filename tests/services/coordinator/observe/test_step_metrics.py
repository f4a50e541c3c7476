"""Metrics of a batch, and the row that they go into."""

from dataclasses import replace

import pytest

from millrace.drops import without_signal
from millrace.ids import PromptId, Version
from millrace.spec import JobSpec
from millrace.spec.passes import compared_rewards
from millrace.telemetry.metrics import catalogue
from millrace.telemetry.metrics.catalogue import UndeclaredMetric
from millrace.telemetry.metrics.declaration import Owner
from services.coordinator.observe.step_metrics import batch_metrics, milliseconds_per_token, step_row, step_seconds
from services.coordinator.state.group import Account, GroupSummary, TrajectoryShape

SPEC = {
    "name": "sums",
    "output": "/runs/1",
    "model": {"path": "/models/1"},
    "data": {"procedural": "reasoning_gym:sums", "max_prompt_tokens": 5},
    "rollout": {"max_response_tokens": 8},
    "schedule": {"steps": 1},
}


def summary(
    prompt_tokens: int,
    response_tokens: list[int],
    rewards: list[float],
    oldest: list[int],
    prompt_id: PromptId = PromptId("0-0"),  # noqa: B008
) -> GroupSummary:
    return GroupSummary(
        prompt_id=prompt_id,
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


@pytest.mark.parametrize(
    ("advantage", "parts", "expected"), [("gdpo", ["score", "right", "short"], 0.0), ("grpo", [], 1.0)]
)
def test_separate_rewards_whose_sum_is_equal_are_a_signal_for_gdpo(
    advantage: str, parts: list[str], expected: float
) -> None:
    """One answer is right and the other one short: each of the two rewards has an advantage."""
    given = {"algorithm": {"advantage": advantage}, "reward": {"function": "math", "parts": parts}}
    spec = JobSpec.model_validate({**SPEC, **given})
    group = replace(summary(5, [8, 2], [1.0, 1.0], [4, 4]), parts={"right": [1.0, 0.0], "short": [0.0, 1.0]})
    assert batch_metrics([group], Version(4), spec)["training/groups_without_signal"] == expected
    dropped = without_signal(*group.compared(compared_rewards(spec)))
    assert (dropped is not None) == bool(expected)


def test_lengths_rewards_and_staleness_of_a_batch() -> None:
    spec = JobSpec.model_validate(SPEC)
    groups = [summary(5, [8, 2], [1.0, 0.0], [3, 4]), summary(3, [8, 8], [0.5, 0.5], [4, 4])]
    found = batch_metrics(groups, Version(4), spec)
    assert (found["critic/score/mean"], found["critic/score/max"], found["critic/score/min"]) == (0.5, 1.0, 0.0)
    assert (found["response_length/mean"], found["response_length/clip_ratio"]) == (6.5, 0.75)
    assert (found["prompt_length/mean"], found["prompt_length/clip_ratio"]) == (4.0, 0.5)
    assert (found["training/staleness/mean"], found["training/groups_without_signal"]) == (0.25, 1.0)
    assert (found["training/epoch"], found["timing_s/reward"], found["response/aborted_ratio"]) == (0.0, 0.5, 0.0)
    assert found["perf/total_num_tokens"] == 8 + 2 + 8 + 8 + 2 * 5 + 2 * 3


def test_versions_of_trajectories_have_the_names_and_values_of_verl() -> None:
    groups = [replace(summary(5, [8, 2], [1.0, 0.0], [1, 3]), newest=[4, 3]), summary(3, [8, 8], [0.5, 0.5], [4, 4])]
    found = batch_metrics(groups, Version(4), JobSpec.model_validate(SPEC))
    told = {key.removeprefix("training/off_policy/trajectory_"): value for key, value in found.items()}
    statistics = ("mean", "max", "min")
    assert [told[f"spans/{each}"] for each in statistics] == [7 / 4, 4.0, 1.0]
    assert [told[f"staleness/{each}"] for each in statistics] == [1 / 4, 1.0, 0.0]
    assert [told[f"staleness_worst/{each}"] for each in statistics] == [4 / 4, 3.0, 0.0]
    assert found["fully_async/count/stale_trajectory_processed"] == 1.0


def test_episodes_that_are_in_no_group_are_told() -> None:
    whole, short = summary(5, [8, 2], [1.0, 0.0], [3, 4]), summary(3, [8, 8], [0.5, 0.5], [4, 4])
    spec = JobSpec.model_validate(SPEC)
    assert not any(key.startswith("episode/") for key in batch_metrics([whole, short], Version(4), spec))
    found = batch_metrics([whole, replace(short, cancelled=3, failed=1)], Version(4), spec)
    assert (found["episode/cancelled_ratio"], found["episode/failed_ratio"]) == (3 / 8, 1 / 8)


def test_turns_and_sampled_tokens_are_told_where_there_are_episodes() -> None:
    spec, plain = JobSpec.model_validate(SPEC), summary(5, [8, 2], [1.0, 0.0], [3, 4])
    assert "num_turns/mean" not in batch_metrics([plain], Version(4), spec)
    shapes = [TrajectoryShape(0, 5, 6, 2), TrajectoryShape(0, 7, 1, 1), TrajectoryShape(1, 5, 3, 1)]
    groups = [plain, replace(summary(5, [8, 2, 4], [1.0, 0.5], [3, 4, 4]), shapes=shapes)]
    found = batch_metrics(groups, Version(4), spec)
    assert [found[f"num_turns/{name}"] for name in ("mean", "max", "min")] == [6 / 4, 3.0, 1.0]
    assert [found[f"num_trajectories/{name}"] for name in ("mean", "max", "min")] == [5 / 4, 2.0, 1.0]
    assert found["response/sampled_ratio"] == 20 / 24 and found["critic/score/mean"] == 2.5 / 4
    assert found["perf/total_num_tokens"] == 10 + 2 * 5 + 14 + 5 + 7 + 5
    assert milliseconds_per_token({"timing_s/gen": 2.0}, groups) == {"timing_per_token_ms/gen": 100.0}


def test_tools_and_limits_are_told_where_there_are_environments() -> None:
    spec, plain = JobSpec.model_validate(SPEC), summary(5, [8, 2], [1.0, 0.0], [3, 4])
    assert not {
        name for name in batch_metrics([plain], Version(4), spec) if name.startswith(("tool_calls", "episode/"))
    }
    accounts = [Account(True, 3, 1, 0.5, 0), Account(False, 1, 0, 0.1, 1, 100, 25, 3.0, 6, 8)]
    found = batch_metrics([plain, replace(plain, accounts=accounts)], Version(4), spec)
    assert [found[f"tool_calls/{name}"] for name in ("mean", "max", "min")] == [2.0, 3.0, 1.0]
    assert (found["tool_calls/failed_ratio"], found["timing_s/tools/max"]) == (0.25, 0.5)
    assert (found["episode/truncated_ratio"], found["episode/rerun_ratio"]) == (0.5, 0.5)
    assert (found["episode/cached_prefix_ratio"], found["timing_s/held_back"]) == (0.25, 3.0)
    assert (found["episode/open"], found["episode/limit"]) == (6.0, 8.0), "of episodes with a limit"
    assert step_row(1, found).values["tool_calls/max"] == 3.0, "each is declared"


def test_separate_rewards_are_told_by_name_where_every_group_has_them() -> None:
    spec, plain = JobSpec.model_validate(SPEC), summary(5, [8, 2], [1.0, 0.0], [3, 4])
    assert not any(key.startswith("rewards/") for key in batch_metrics([plain], Version(4), spec))
    groups = [
        replace(plain, parts={"format": [1.0, 0.0], "right": [0.5, 0.0]}),
        replace(plain, parts={"format": [1.0, 1.0]}),
    ]
    found = batch_metrics(groups, Version(4), spec)
    told = {key: value for key, value in found.items() if key.startswith("rewards/")}
    assert told == {"rewards/format/mean": 0.75, "rewards/format/max": 1.0, "rewards/format/min": 0.0}
    catalogue.check(told, [Owner.COORDINATOR])


def test_the_epoch_is_the_later_pass_and_empty_responses_are_counted() -> None:
    groups = [summary(5, [8, 0], [1.0, 0.0], [3, 4], PromptId(f"{turn}-7")) for turn in (11, 2)]
    found = batch_metrics(groups, Version(4), JobSpec.model_validate(SPEC))
    assert (found["training/epoch"], found["response/aborted_ratio"]) == (11.0, 0.5)


def test_milliseconds_per_token_are_of_response_tokens_for_generation_and_of_all_for_the_rest() -> None:
    groups = [summary(5, [8, 2], [1.0, 0.0], [3, 4]), summary(3, [10], [0.5], [4])]
    found = milliseconds_per_token({"timing_s/gen": 2.0, "timing_s/update_actor": 3.3, "timing_s/fetch": 1.0}, groups)
    assert found == pytest.approx(
        {"timing_per_token_ms/gen": 2000 / 20, "timing_per_token_ms/update_actor": 3300 / (20 + 2 * 5 + 3)}
    )
    assert step_row(3, found).values["timing_per_token_ms/gen"] == 100.0


def test_a_row_keeps_what_it_had_and_refuses_what_nobody_declared() -> None:
    row = step_row(3, {"timing_s/gen": 1.0, "timing_s/train": 3.0}, trainer={"actor/grad_norm": 0.5, "actor/ours": 1.0})
    seconds = step_seconds({**row.values, "perf/total_num_tokens": 80.0}, devices=2)
    values = step_row(3, seconds, earlier=row.values).values
    assert values["training/global_step"] == 3.0 and values["actor/ours"] == 1.0
    assert (values["timing_s/step"], values["perf/time_per_step"], values["perf/throughput"]) == (4.0, 4.0, 10.0)
    assert values["trainer/idle_ratio"] == 0.25
    with pytest.raises(UndeclaredMetric, match="perf/invented"):
        step_row(3, {"perf/invented": 1.0})
    with pytest.raises(UndeclaredMetric, match="perf/invented"):
        step_row(3, {}, trainer={"perf/invented": 1.0})
    with pytest.raises(UndeclaredMetric, match="owned by the coordinator"):
        step_row(3, {}, trainer={"timing_s/gen": 1.0})
    with pytest.raises(UndeclaredMetric, match="owned by the trainer"):
        step_row(3, {"actor/grad_norm": 1.0})

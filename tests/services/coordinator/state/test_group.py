"""What is read of a group, and which groups are refused."""

import json
import math

import pytest

from millrace.drops import DropReason
from millrace.ids import Version
from millrace.wire.arrays import pack_logprobs, pack_tokens
from millrace.wire.v1 import common_pb2
from services.coordinator.observe.samples import samples_of
from services.coordinator.state.group import GroupSummary, fault


def trajectory(spans: list[tuple[int, int, int]], reward: float | None = 1.0, tokens: int = 4) -> common_pb2.Trajectory:
    made = common_pb2.Trajectory(
        tokens=pack_tokens(range(tokens)),
        logprobs=pack_logprobs([-0.5] * tokens),
        versions=[common_pb2.VersionSpan(version=v, start=start, end=end) for v, start, end in spans],
        stop_reason=common_pb2.STOP_REASON_LENGTH,
        text="abcd",
        reward_failure="" if reward is not None else "raised ValueError: no",
    )
    if reward is not None:
        made.reward = reward
    return made


def group(*trajectories: common_pb2.Trajectory) -> common_pb2.Group:
    return common_pb2.Group(
        prompt_id="0-7",
        purpose=common_pb2.PURPOSE_TRAIN,
        data_source="sums",
        prompt_tokens=pack_tokens([1, 2, 3]),
        ground_truth='"8"',
        member_id="rollout-a",
        trajectories=trajectories,
    )


def test_a_group_is_summed_up() -> None:
    made = group(trajectory([(3, 0, 2), (4, 2, 4)], 0.5), trajectory([(5, 0, 4)]))
    assert fault(made, samples=2) is None
    summary = GroupSummary.of(made)
    assert (summary.prompt_tokens, summary.response_tokens, summary.rewards) == (3, [4, 4], [0.5, 1.0])
    assert (summary.oldest, summary.truncated) == ([3, 5], 2)
    assert summary.staleness(Version(5)) == 2
    assert GroupSummary.from_json(summary.to_json()) == summary


def evaluated(*details: str) -> GroupSummary:
    made = group(*(trajectory([(1, 0, 4)]) for _ in details))
    made.purpose = common_pb2.PURPOSE_EVALUATION
    for one, text in zip(made.trajectories, details, strict=True):
        one.reward_details = text
    return GroupSummary.of(made)


def test_accuracies_and_votes_of_held_out_answers_are_kept() -> None:
    found = evaluated('{"acc": true, "pred": "8"}', '{"acc": 0.5, "pred": {"b": 1, "a": 2}}', '{"acc": 0, "pred": "8"}')
    assert found.accuracies == [1.0, 0.5, 0.0]
    assert found.votes is not None and found.votes[0] == found.votes[2] != found.votes[1]
    assert evaluated('{"pred": {"a": 2, "b": 1}}').votes == found.votes[1:2]
    assert len(evaluated(f'{{"pred": "{"x" * 100000}"}}').to_json()) < 500
    assert GroupSummary.from_json(found.to_json()) == found
    older = {key: value for key, value in json.loads(found.to_json()).items() if key not in ("accuracies", "votes")}
    assert GroupSummary.from_json(json.dumps(older)).votes is None


@pytest.mark.parametrize(
    "details",
    ["", "null", "[1]", "{", '{"acc": "yes"}', '{"acc": NaN}', '{"acc": 1e300}', '{"acc": null}', "[" * 10000],
)
def test_what_one_answer_lacks_none_has(details: str) -> None:
    found = evaluated('{"acc": 1, "pred": 3}', details)
    assert found.accuracies is None and found.votes is None


def test_of_training_groups_no_details_are_read() -> None:
    one = trajectory([(1, 0, 4)])
    one.reward_details = '{"acc": 1, "pred": 3}'
    found = GroupSummary.of(group(one))
    assert found.accuracies is None and found.votes is None


@pytest.mark.parametrize(
    ("made", "reason", "detail"),
    [
        (group(), DropReason.INCOMPLETE_GROUP, "0 trajectories instead of 1"),
        (group(trajectory([(1, 0, 4)], None)), DropReason.REWARD_FAILED, "raised ValueError: no"),
        (group(trajectory([(1, 0, 4)], math.nan)), DropReason.REWARD_FAILED, "the reward is nan"),
        (group(trajectory([(1, 0, 4)], math.inf)), DropReason.REWARD_FAILED, "the reward is inf"),
        (
            group(trajectory([(1, 0, 4)], 1e39)),
            DropReason.REWARD_FAILED,
            "the reward is 1e+39, not a number to compute with in float32; give a finite one of at most 1e+15",
        ),
        (group(trajectory([(1, 0, 3)])), DropReason.MALFORMED_GROUP, "the version spans do not cover"),
        (group(trajectory([(1, 0, 2), (2, 3, 4)])), DropReason.MALFORMED_GROUP, "the version spans do not cover"),
        (group(trajectory([])), DropReason.MALFORMED_GROUP, "the version spans do not cover"),
        (group(trajectory([(1, 0, 0)], tokens=0)), DropReason.MALFORMED_GROUP, "0 tokens"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_its_reason(
    made: common_pb2.Group, reason: DropReason, detail: str
) -> None:
    drop = fault(made, samples=1)
    assert drop is not None and drop.reason is reason and drop.detail.startswith(detail)


@pytest.mark.parametrize("reward", [None, math.nan, -1e39])
def test_a_group_without_the_greedy_answer_that_was_asked_for_is_refused(reward: float | None) -> None:
    made = group(trajectory([(1, 0, 4)]))
    assert fault(made, samples=1) is None
    if reward is not None:
        made.greedy_reward = reward
    drop = fault(made, samples=1, greedy_baseline=True)
    assert drop is not None and str(drop) == "incomplete_group: there is no reward of a greedy answer"
    made.greedy_reward = 0.0
    assert fault(made, samples=1, greedy_baseline=True) is None


def test_log_probabilities_have_to_be_as_many_as_tokens() -> None:
    short = trajectory([(1, 0, 4)])
    short.logprobs = pack_logprobs([-0.5] * 3)
    drop = fault(group(short), samples=1)
    assert drop is not None and str(drop) == "malformed_group: 4 tokens with 3 log-probabilities"


def test_samples_are_readable() -> None:
    shown = samples_of(group(trajectory([(3, 0, 2), (4, 2, 4)]), trajectory([(4, 0, 4)], None)), step=9)
    assert [s.reward for s in shown] == [1.0, None] and shown[1].reward_failure == "raised ValueError: no"
    assert (shown[0].versions, shown[0].ground_truth, shown[0].stop_reason) == ([3, 4], "8", "length")
    assert (shown[0].step, shown[0].purpose, shown[0].tokens) == (9, "train", 4)

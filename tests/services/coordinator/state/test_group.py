"""What is read of a group, and which groups are refused."""

import json
import math

import pytest

from millrace.contracts.v1 import common_pb2, trainer_pb2
from millrace.drops import DropReason
from millrace.ids import Version
from millrace.spec.schedule import Schedule, StalenessOf
from millrace.wire.arrays import pack_logprobs, pack_tokens
from services.coordinator.observe.groups import samples_of
from services.coordinator.stages.admit import is_late
from services.coordinator.stages.batch import group_ref
from services.coordinator.state.group import GroupSummary, Wanted, fault

STALENESS_OF: tuple[StalenessOf, ...] = ("oldest", "mean", "versions")


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
    assert fault(made, Wanted(2)) is None
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
        (group(), DropReason.INCOMPLETE_GROUP, "0 episodes instead of 1"),
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
        (group(trajectory([(1, 0, 0)], tokens=0)), DropReason.MALFORMED_GROUP, "0 sampled tokens"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_its_reason(
    made: common_pb2.Group, reason: DropReason, detail: str
) -> None:
    drop = fault(made, Wanted(1))
    assert drop is not None and drop.reason is reason and drop.detail.startswith(detail)


@pytest.mark.parametrize("reward", [None, math.nan, -1e39])
def test_a_group_without_the_greedy_answer_that_was_asked_for_is_refused(reward: float | None) -> None:
    made = group(trajectory([(1, 0, 4)]))
    assert fault(made, Wanted(1)) is None
    if reward is not None:
        made.greedy_reward = reward
    drop = fault(made, Wanted(1, greedy_baseline=True))
    assert drop is not None and str(drop) == "incomplete_group: there is no reward of a greedy answer"
    made.greedy_reward = 0.0
    assert fault(made, Wanted(1, greedy_baseline=True)) is None


@pytest.mark.parametrize(
    ("episodes", "told"), [(1, "1 episodes instead of 2 to 3"), (2, ""), (3, ""), (4, "4 episodes")]
)
def test_a_group_may_lack_episodes_as_long_as_enough_are_there(episodes: int, told: str) -> None:
    made = group(*(trajectory([(1, 0, 4)]) for _ in range(episodes)))
    made.cancelled_episodes, made.failed_episodes = 2, 1
    drop = fault(made, Wanted(3, least=2))
    assert (drop is None) == (told == "")
    if drop is not None:
        assert drop.reason is DropReason.INCOMPLETE_GROUP and drop.detail.startswith(told)
    summary = GroupSummary.from_json(GroupSummary.of(made).to_json())
    assert (summary.cancelled, summary.failed) == (2, 1)


def test_log_probabilities_have_to_be_as_many_as_tokens() -> None:
    short = trajectory([(1, 0, 4)])
    short.logprobs = pack_logprobs([-0.5] * 3)
    drop = fault(group(short), Wanted(1))
    assert drop is not None and str(drop) == "malformed_group: 4 sampled tokens with 3 log-probabilities"


@pytest.mark.parametrize(("scored", "top", "right"), [(4, 3, True), (4, 2, False), (3, 3, False), (0, 0, False)])
def test_the_scores_of_a_teacher_have_to_be_as_many_as_sampled_tokens(scored: int, top: int, right: bool) -> None:
    told, answer = pack_logprobs([-1.0] * scored * top), trajectory([(0, 0, 4)])
    told_tokens, told_scores = pack_tokens([7] * scored * top), pack_logprobs([-1.0] * scored)
    answer.teacher.CopyFrom(common_pb2.TokenScores(logprobs=told_scores, top_tokens=told_tokens, top_logprobs=told))
    drop = fault(group(answer), Wanted(1, teacher_top=3))
    assert (drop is None) == right
    assert drop is None or drop.reason is DropReason.MALFORMED_GROUP
    assert fault(group(answer), Wanted(1)) is None


def test_samples_are_readable() -> None:
    shown = samples_of(group(trajectory([(3, 0, 2), (4, 2, 4)]), trajectory([(4, 0, 4)], None)), step=9)
    assert [s.reward for s in shown] == [1.0, None] and shown[1].reward_failure == "raised ValueError: no"
    assert (shown[0].versions, shown[0].ground_truth, shown[0].stop_reason) == ([3, 4], "8", "length")
    assert (shown[0].step, shown[0].purpose, shown[0].tokens) == (9, "train", 4)


def of_turns(*turns: tuple[int, int], tokens: int = 8, reward: float | None = 1.0) -> common_pb2.Trajectory:
    """A trajectory whose turns earned a quarter each."""
    made = trajectory([(2 + number, start, end) for number, (start, end) in enumerate(turns)], reward, tokens)
    made.logprobs = pack_logprobs([-0.5] * sum(end - start for start, end in turns))
    made.reward_failure = made.text = ""
    for start, end in turns:
        made.turns.add(start=start, end=end, reward=0.25, given_text="<tool>", text="more")
    return made


def episodic(sizes: list[int], *trajectories: common_pb2.Trajectory) -> common_pb2.Group:
    made = group(*trajectories)
    made.episode_trajectories.extend(sizes)
    return made


def rewritten() -> common_pb2.Group:
    """Two episodes, the first of two trajectories of which the second has a prompt of its own."""
    second = of_turns((0, 8))
    second.prompt_tokens, second.prompt_text = pack_tokens(range(7)), "in short"
    return episodic([2, 1], of_turns((0, 2), (4, 6), reward=None), second, of_turns((1, 3)))


def test_episodes_are_summed_up() -> None:
    made = rewritten()
    assert fault(made, Wanted(2, temperature=1.0, most_tokens=15)) is None
    summary = GroupSummary.of(made)
    assert (summary.rewards, summary.response_tokens, summary.oldest) == ([1.75, 1.25], [8, 8, 8], [2, 2, 2])
    assert (summary.lengths, summary.sampled_tokens) == ([11, 15, 11], 4 + 8 + 2)
    assert (summary.turns, summary.trajectories_of_episodes) == ([3, 1], [2, 1])
    assert GroupSummary.from_json(summary.to_json()) == summary


def test_a_step_names_the_lengths_of_episodes_and_of_plain_answers_as_before() -> None:
    ref = group_ref(GroupSummary.of(rewritten()))
    assert not ref.response_tokens
    lengths = [(t.prompt_tokens, t.response_tokens, t.sampled_tokens, t.episode) for t in ref.trajectories]
    assert lengths == [(3, 8, 4, 0), (7, 8, 8, 0), (3, 8, 2, 1)]
    plain = group_ref(GroupSummary.of(group(trajectory([(1, 0, 4)]), trajectory([(1, 0, 4)]))))
    assert plain == trainer_pb2.GroupRef(prompt_id="0-7", prompt_tokens=3, response_tokens=[4, 4])


def test_a_plain_answer_is_the_same_message_as_in_the_first_release() -> None:
    """Its fields are those of 0.1, so that members of that release and of this one understand each other."""
    made = group(trajectory([(3, 0, 4)]))
    sent = {field.name for field, _ in made.ListFields()} | {f.name for f, _ in made.trajectories[0].ListFields()}
    assert not sent & {"turns", "metadata", "episode_trajectories"}
    assert GroupSummary.of(made).shapes is None


def test_accuracies_are_those_of_the_last_trajectory_of_an_episode() -> None:
    made = rewritten()
    made.purpose = common_pb2.PURPOSE_EVALUATION
    made.trajectories[1].reward_details = made.trajectories[2].reward_details = '{"acc": 1}'
    assert GroupSummary.of(made).accuracies == [1.0, 1.0]


def test_separate_rewards_are_those_of_every_episode() -> None:
    made = rewritten()
    made.trajectories[1].reward_details = '{"format": 1, "right": 0.5, "huge": 1e99, "some": 1}'
    made.trajectories[2].reward_details = '{"format": 0, "right": 0, "huge": 1, "text": "x"}'
    summary = GroupSummary.of(made, ["format", "right", "huge", "some", "text"])
    assert summary.parts == {"format": [1.0, 0.0], "right": [0.5, 0.0]}
    assert GroupSummary.from_json(summary.to_json()) == summary
    assert GroupSummary.of(made).parts is None


def spoilt(**fields: object) -> common_pb2.Group:
    """One turn of two sampled tokens, with other values in its trajectory."""
    one = of_turns((2, 4))
    for name, value in fields.items():
        setattr(one, name, value)
    return group(one)


def with_turns(*turns: tuple[int, int]) -> common_pb2.Group:
    one = of_turns((2, 4))
    del one.turns[:]
    for start, end in turns:
        one.turns.add(start=start, end=end)
    return group(one)


@pytest.mark.parametrize(
    ("made", "reason", "detail"),
    [
        (episodic([1], of_turns((0, 8)), of_turns((0, 8))), DropReason.MALFORMED_GROUP, "2 trajectories in episodes"),
        (episodic([0, 1], of_turns((0, 8))), DropReason.MALFORMED_GROUP, "1 trajectories in episodes of [0, 1]"),
        (episodic([1, 1], *[of_turns((0, 8))] * 2), DropReason.INCOMPLETE_GROUP, "2 episodes instead of 1"),
        (
            episodic([2], of_turns((0, 8)), of_turns((0, 8), reward=None)),
            DropReason.REWARD_FAILED,
            "there is no reward",
        ),
        (with_turns((2, 4), (3, 5)), DropReason.MALFORMED_GROUP, "the turns [(2, 4), (3, 5)] do not follow"),
        (with_turns((2, 9)), DropReason.MALFORMED_GROUP, "the turns [(2, 9)] do not follow"),
        (with_turns((2, 2)), DropReason.MALFORMED_GROUP, "the turns [(2, 2)] do not follow"),
        (with_turns((2, 5)), DropReason.MALFORMED_GROUP, "3 sampled tokens with 2 log-probabilities"),
        (with_turns((3, 5)), DropReason.MALFORMED_GROUP, "the version spans do not cover the 2 sampled tokens"),
        (spoilt(logprobs=pack_logprobs([-0.5] * 8)), DropReason.MALFORMED_GROUP, "2 sampled tokens with 8 log-prob"),
        (spoilt(prompt_tokens=b"12345"), DropReason.MALFORMED_GROUP, "5 bytes of prompt tokens"),
        (spoilt(prompt_tokens=pack_tokens(range(8))), DropReason.MALFORMED_GROUP, "a trajectory has 16 tokens, more"),
        (spoilt(reward=1e15), DropReason.REWARD_FAILED, "the reward is 1000000000000000.2, not a number"),
    ],
)
def test_episodes_that_cannot_be_trained_are_refused_with_their_reason(
    made: common_pb2.Group, reason: DropReason, detail: str
) -> None:
    drop = fault(made, Wanted(1, temperature=1.0, most_tokens=15))
    assert drop is not None and drop.reason is reason and drop.detail.startswith(detail), drop


def test_a_turn_at_another_temperature_than_the_trainers_is_refused() -> None:
    made = group(of_turns((2, 4)))
    made.trajectories[0].turns[0].temperature = 0.5
    assert fault(made, Wanted(1)) is None and fault(made, Wanted(1, temperature=0.5)) is None
    drop = fault(made, Wanted(1, temperature=1.0))
    assert drop is not None and drop.detail == "a turn was sampled at temperature 0.5, the job trains at 1"


@pytest.mark.parametrize("sizes", [[2**32 - 1], [0], [1, 2**31, 1], [1] * 50])
def test_a_group_whose_episodes_do_not_add_up_is_refused_and_shown_at_no_cost(sizes: list[int]) -> None:
    made = episodic(sizes, of_turns((0, 8)), of_turns((0, 8)))
    drop = fault(made, Wanted(len(sizes)))
    assert drop is not None and drop.reason is DropReason.MALFORMED_GROUP and len(drop.detail) < 200
    assert len(samples_of(made, step=1)) == 2


def test_samples_have_turns() -> None:
    first, second, third = samples_of(rewritten(), step=3)
    assert [(s.episode, s.tokens, s.sampled_tokens) for s in (first, second, third)] == [
        (0, 8, 4),
        (0, 8, 8),
        (1, 8, 2),
    ]
    assert (first.prompt, second.prompt, first.answer) == ("", "in short", "<tool>more<tool>more")
    turns = [(turn.given_tokens, turn.sampled_tokens, turn.reward, turn.versions) for turn in first.turns]
    assert turns == [(0, 2, 0.25, [2]), (2, 2, 0.25, [3])]
    assert samples_of(group(trajectory([(1, 0, 4)])), step=1)[0].turns == []


def test_staleness_is_of_the_oldest_token_of_all_tokens_or_of_versions() -> None:
    plain = GroupSummary.of(group(trajectory([(3, 0, 4)]), trajectory([(5, 0, 4)])))
    assert [plain.staleness(Version(5), of) for of in STALENESS_OF] == [2, 2, 0]
    several = GroupSummary.of(group(trajectory([(2, 0, 1), (4, 1, 2), (5, 2, 4)]), trajectory([(5, 0, 4)])))
    assert [several.staleness(Version(5), of) for of in STALENESS_OF] == [3, 5 - (2 + 4 + 5 + 5) / 4, 2]
    assert (plain.spans, several.spans) == ([0, 0], [3, 0])
    assert (plain.newest_version, several.newest_version) == (5, 5)
    assert GroupSummary.from_json(several.to_json()) == several
    assert all(several.staleness(Version(1), of) < 0 for of in STALENESS_OF), "tokens of a version that is not there"
    mean, counted = (Schedule(max_staleness=2, staleness_of=of) for of in STALENESS_OF[1:])
    assert not is_late(several, Version(5), mean) and is_late(several, Version(7), mean)
    assert not is_late(several, Version(60), counted)
    assert is_late(several, Version(5), Schedule(max_staleness=2))
    assert not is_late(several, Version(5), Schedule(max_staleness=2, too_stale="train"))
    assert is_late(several, Version(1), Schedule(max_staleness=2, too_stale="train"))

"""Episodes as messages: the tokens that the engine saw, whatever became of the history."""

import json

import numpy as np
import pytest

from millrace.ids import Version
from millrace.wire.arrays import unpack_experts, unpack_logprobs, unpack_tokens
from millrace.wire.v1 import common_pb2
from services.coordinator.state.group import Wanted, fault
from services.rollout.engine import Sample, StopReason, VersionSpan
from services.rollout.scoring.pool import Scored
from services.rollout.work.episode import Episode, Trajectory, Turn


def sample(first: int, count: int, version: int = 0, experts: int | None = None) -> Sample:
    """`experts`: number of tokens whose experts are told, all of them the version."""
    told = None if experts is None else np.full((experts, 2, 1), version, np.int64)
    spans = (VersionSpan(Version(version), 0, count),)
    tokens = np.arange(first, first + count, dtype=np.int32)
    return Sample(tokens, np.full(count, -0.5, np.float32), spans, StopReason.END_OF_TURN, f"t{first}", told)


def given(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def episode() -> Episode:
    """A tool is called; then the history is rewritten."""
    first = Trajectory((Turn(sample(10, 3, 4)), Turn(sample(20, 2, 5), given(1, 2), "<tool>", reward=0.5)))
    second = Trajectory((Turn(sample(30, 4, 5), temperature=0.7),), given(7, 8, 9), "in short", {"summary": True})
    return Episode((first, second))


def test_an_answer_is_told_as_plainly_as_without_episodes() -> None:
    (message,) = Episode.of(sample(5, 3, 2)).messages(Scored(1.0, {"acc": 1}))
    told = {field.name for field, _ in message.ListFields()}
    assert told == {"tokens", "logprobs", "versions", "stop_reason", "text", "reward", "reward_details"}
    assert unpack_tokens(message.tokens).tolist() == [5, 6, 7] and message.text == "t5"
    assert (message.reward, json.loads(message.reward_details)) == (1.0, {"acc": 1})


def test_turns_keep_the_tokens_of_the_engine_and_what_was_given_between() -> None:
    first, second = episode().messages(Scored(0.25))
    assert unpack_tokens(first.tokens).tolist() == [10, 11, 12, 1, 2, 20, 21]
    assert len(unpack_logprobs(first.logprobs)) == 5
    assert [(v.version, v.start, v.end) for v in first.versions] == [(4, 0, 3), (5, 5, 7)]
    assert [(t.start, t.end, t.reward, t.given_text, t.text) for t in first.turns] == [
        (0, 3, 0.0, "", "t10"),
        (5, 7, 0.5, "<tool>", "t20"),
    ]
    assert not first.text and not first.HasField("reward") and not first.prompt_tokens
    assert unpack_tokens(second.prompt_tokens).tolist() == [7, 8, 9] and second.prompt_text == "in short"
    assert (second.reward, second.turns[0].temperature, json.loads(second.metadata)) == (0.25, 0.7, {"summary": True})
    assert episode().answer == "t30"


def test_the_coordinator_takes_what_an_episode_becomes() -> None:
    messages = [message for _ in range(2) for message in episode().messages(Scored(1.0))]
    group = common_pb2.Group(prompt_tokens=b"\0" * 8, trajectories=messages, episode_trajectories=[2, 2])
    assert fault(group, Wanted(2, temperature=0.7, most_tokens=9)) is None


@pytest.mark.parametrize(("told", "expected"), [((4, 9), [4] * 4 + [5] * 5), ((5, 10), [4] * 5 + [5] * 5)])
def test_experts_are_those_of_the_turn_that_sampled_the_token(told: tuple[int, int], expected: list[int]) -> None:
    """Two prompt tokens, three sampled, two given, three sampled. A turn may not know its last token's experts."""
    turns = (Turn(sample(10, 3, 4, told[0])), Turn(sample(20, 3, 5, told[1]), given(1, 2)))
    (message,) = Episode((Trajectory(turns),)).messages()
    experts = unpack_experts(message.experts, 10)
    assert experts[: len(expected), 0, 0].tolist() == expected and (experts[len(expected) :] == -1).all()
    assert not Episode((Trajectory(turns),)).without_experts().messages()[0].HasField("experts")
    unknown = (turns[0], Turn(sample(20, 3, 5), given(1, 2)))
    assert not Episode((Trajectory(unknown),)).messages()[0].HasField("experts")

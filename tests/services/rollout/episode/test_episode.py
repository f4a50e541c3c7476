"""Episodes as messages: the tokens that the engine saw, whatever became of the history."""

import asyncio
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from millrace.contracts.trajectories import sampled_spans
from millrace.contracts.v1 import common_pb2
from millrace.ids import Version
from millrace.wire.arrays import unpack_experts, unpack_logprobs, unpack_tokens
from services.coordinator.state.group import Wanted, fault
from services.rollout import replica
from services.rollout.engine import Completion, Engine, Sampling, StopReason, VersionSpan
from services.rollout.episode.episode import Episode, Prompt, Trajectory, Turn
from services.rollout.episode.slots import EpisodeSlot
from services.rollout.scoring.scored import Scored
from services.rollout.work.groups import GroupGenerator
from tests.models import random_model
from tests.services.rollout.coordinator import until
from tests.services.rollout.jobs import job_spec
from tests.services.rollout.reference import logprobs
from tests.services.rollout.stack import replica_stack


def sample(first: int, count: int, version: int = 0, experts: int | None = None) -> Completion:
    """`experts`: number of tokens whose experts are told, all of them the version."""
    told = None if experts is None else np.full((experts, 2, 1), version, np.int64)
    spans = (VersionSpan(Version(version), 0, count),)
    tokens = np.arange(first, first + count, dtype=np.int32)
    return Completion(tokens, np.full(count, -0.5, np.float32), spans, StopReason.END_OF_TURN, f"t{first}", told)


def given(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def episode() -> Episode:
    """A tool is called; then the history is rewritten."""
    first = Trajectory((Turn(sample(10, 3, 4)), Turn(sample(20, 2, 5), given(1, 2), "<tool>", reward=0.5)))
    second = Trajectory((Turn(sample(30, 4, 5), temperature=0.7),), given(7, 8, 9), "in short", {"summary": True})
    return Episode((first, second))


def test_a_conversation_is_the_text_of_the_last_trajectory() -> None:
    assert episode().conversation("<question>") == "in shortt30"
    first = Episode(episode().trajectories[:1])
    assert first.conversation("<question>") == "<question>t10<tool>t20"


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


async def two_turns_and_a_fork(engine: Engine, prompt: Prompt, sampling: Sampling, slot: EpisodeSlot) -> Episode:
    """A tool answers the first turn; then the history is cut to its end. Each turn extends the tokens of the engine."""
    tool = given(*b"<tool>42</tool>")
    history = [np.array(prompt.rendered.token_ids, np.int32)]
    turns: list[Turn] = []
    for before in (given(), tool):
        sampled = await engine.generate(np.concatenate([*history, before]).tolist(), sampling)
        slot.completed(sampled)
        history += [before, sampled.tokens]
        turns.append(Turn(sampled, before, "<tool>42</tool>" if len(before) else "", reward=0.25))
    short = np.concatenate(history)[-9:]
    last = await engine.generate(short.tolist(), sampling)
    slot.completed(last)
    return Episode((Trajectory(tuple(turns)), Trajectory((Turn(last),), short, "in short")))


def test_a_replica_answers_with_episodes_whose_log_probabilities_are_those_of_the_whole_sequence(
    tied_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "GroupGenerator", partial(GroupGenerator, run_episode=two_turns_and_a_fork))

    async def scenario() -> tuple[common_pb2.Group, int]:
        async with replica_stack() as stack:
            await stack.serve(job_spec(tied_model), version=3)
            prompt_id = stack.coordinator.issue(7, samples=3, max_response_tokens=10)
            await until(lambda: stack.coordinator.answered == 1)
            return stack.coordinator.groups[prompt_id], stack.replica.leases.generated_tokens

    group, generated = asyncio.run(scenario())
    assert list(group.episode_trajectories) == [2, 2, 2]
    assert fault(group, Wanted(3, temperature=1.0, most_tokens=4096)) is None
    model, sampled_tokens = random_model(tied=True, seed=3), 0
    for trajectory in group.trajectories:
        prompt = unpack_tokens(trajectory.prompt_tokens or group.prompt_tokens)
        expected = logprobs(model, prompt.tolist(), unpack_tokens(trajectory.tokens).tolist())
        at = [place for start, end in sampled_spans(trajectory) for place in range(start, end)]
        assert np.abs(unpack_logprobs(trajectory.logprobs) - np.asarray(expected)[at]).max() < 1e-3
        sampled_tokens += len(at)
    assert sampled_tokens == generated
    assert [one.HasField("reward") for one in group.trajectories] == [False, True] * 3

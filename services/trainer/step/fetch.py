"""Fetches this rank's trajectories from the coordinator's Work service."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from millrace.contracts.methods import WorkRpc
from millrace.contracts.trajectories import episode_sizes
from millrace.contracts.v1 import common_pb2, work_pb2
from millrace.errors import InvalidState
from millrace.rewards.outcome import BadOutcome, separate_rewards
from millrace.wire.arrays import TokenScores, unpack_experts, unpack_logprobs, unpack_tokens
from millrace.wire.channel import Peer
from services.trainer.protocol.microbatch import Sample, Turn
from services.trainer.step.batch import TrajectoryRef


async def fetch(
    address: str,
    job_id: str,
    wanted: Sequence[TrajectoryRef],
    reward_parts: Sequence[str] = (),
    teacher_top: int | None = None,
) -> list[Sample]:
    """The wanted trajectories, in their order, with the separate rewards that the job names. `teacher_top`: number of
    tokens that the job's teacher reports in each place; None for a job without a teacher.

    Raises InvalidState if a trajectory is not as the coordinator announced it.
    """
    if not wanted:
        return []
    prompts = list(dict.fromkeys(ref.prompt_id for ref in wanted))
    groups: dict[str, common_pb2.Group] = {}
    peer = Peer(address)
    try:
        request = work_pb2.FetchRequest(job_id=job_id, prompt_ids=prompts)
        async for group in peer.stream(WorkRpc.Fetch, request):
            groups[group.prompt_id] = group
    finally:
        await peer.close()
    missing = [prompt for prompt in prompts if prompt not in groups]
    if missing:
        what = f"{address} did not give the groups of {len(missing)} prompts of {job_id}, the first {missing[0]}."
        raise InvalidState(what, "ask for a step of groups that the coordinator still holds.")
    samples = [_sample(ref, groups[ref.prompt_id], reward_parts) for ref in wanted]
    if teacher_top is None:
        return samples
    return [
        _with_teacher_scores(ref, groups[ref.prompt_id], one, teacher_top)
        for ref, one in zip(wanted, samples, strict=True)
    ]


def _sample(ref: TrajectoryRef, group: common_pb2.Group, reward_parts: Sequence[str]) -> Sample:
    if ref.sample >= len(group.trajectories):
        raise _differs(ref, f"its group has only {len(group.trajectories)} samples")
    trajectory = group.trajectories[ref.sample]
    try:
        prompt = unpack_tokens(trajectory.prompt_tokens or group.prompt_tokens)
        response, logprobs = unpack_tokens(trajectory.tokens), unpack_logprobs(trajectory.logprobs)
    except ValueError as error:
        raise _differs(ref, "its arrays have half an element") from error
    if not len(prompt):
        raise _differs(ref, "its prompt has no token")
    if (len(prompt), len(response)) != (ref.prompt_tokens, ref.response_tokens):
        raise _differs(
            ref, f"it has {len(prompt)} + {len(response)} tokens, not {ref.prompt_tokens} + {ref.response_tokens}"
        )
    turns = _turns(ref, trajectory, len(response))
    if len(logprobs) != ref.sampled_tokens:
        raise _differs(ref, f"it has {ref.sampled_tokens} sampled tokens but {len(logprobs)} log-probabilities")
    reward, parts = _rewards(ref, group, reward_parts)
    experts = None
    if trajectory.HasField("experts"):
        try:
            experts = unpack_experts(trajectory.experts, len(prompt) + len(response))
        except ValueError as error:
            raise _differs(ref, str(error)) from error
    greedy = group.greedy_reward if group.HasField("greedy_reward") else None
    versions = np.full(len(response), -1, np.int64)
    for span in trajectory.versions:
        versions[span.start : span.end] = span.version
    if turns:
        versions = np.concatenate([versions[turn.start : turn.end] for turn in turns])
    known = (experts, versions, turns, None, tuple(group.images))
    return Sample(ref.label, prompt, response, logprobs, reward, parts, greedy, group.engine, *known)


def _with_teacher_scores(ref: TrajectoryRef, group: common_pb2.Group, sample: Sample, top: int) -> Sample:
    """The sample with the teacher's scores of its sampled tokens."""
    try:
        scores = TokenScores.of(group.trajectories[ref.sample].teacher, ref.sampled_tokens, top)
    except ValueError as error:
        raise _differs(ref, f"the teacher's scores: {error}") from error
    return replace(sample, teacher=scores)


def _turns(ref: TrajectoryRef, trajectory: common_pb2.Trajectory, tokens: int) -> tuple[Turn, ...]:
    """The turns of a response of `tokens` tokens; none if all of it was sampled at once."""
    turns = tuple(Turn(turn.start, turn.end, turn.reward) for turn in trajectory.turns)
    ends = [0, *(turn.end for turn in turns)]
    if any(turn.start < before or turn.end <= turn.start for before, turn in zip(ends, turns, strict=False)):
        raise _differs(ref, "its turns do not follow each other")
    if ends[-1] > tokens:
        raise _differs(ref, f"its turns end at {ends[-1]} of {tokens} response tokens")
    sampled = sum(turn.end - turn.start for turn in turns) if turns else tokens
    if sampled != ref.sampled_tokens:
        raise _differs(ref, f"it has {sampled} sampled tokens, not {ref.sampled_tokens}")
    return turns


def _rewards(
    ref: TrajectoryRef, group: common_pb2.Group, reward_parts: Sequence[str]
) -> tuple[float, tuple[float, ...]]:
    """The reward of a trajectory, and the separate rewards of the episode that it ends; 0 each if it ends none."""
    trajectory = group.trajectories[ref.sample]
    ends_episode = ref.sample + 1 in itertools.accumulate(episode_sizes(group))
    if not trajectory.HasField("reward") and (ends_episode or trajectory.reward_failure):
        raise _differs(ref, f"it has no reward: {trajectory.reward_failure}")
    if not ends_episode:
        return trajectory.reward, (0.0,) * len(reward_parts)
    try:
        details = json.loads(trajectory.reward_details or "{}")
        return trajectory.reward, separate_rewards(trajectory.reward, details, reward_parts)
    except BadOutcome as error:
        raise _differs(ref, f"its scorer {error}") from error
    except (ValueError, RecursionError) as error:
        raise _differs(ref, "its reward details are not JSON") from error


def _differs(ref: TrajectoryRef, how: str) -> InvalidState:
    return InvalidState(f"{ref.label} cannot be trained: {how}.", "drop its group with that reason.")

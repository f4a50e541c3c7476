"""Random groups with uneven lengths, and the spec of a job that trains them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from millrace.contracts.v1 import common_pb2
from millrace.contracts.v1.trainer_pb2 import GroupRef
from millrace.spec import JobSpec, parse, received
from millrace.wire.arrays import pack_logprobs, pack_tokens
from services.coordinator.stages.batch import group_ref
from services.coordinator.state.group import GroupSummary

BYTES = 256


def job_spec(model: Path, /, **parts: dict[str, Any] | list[Any]) -> JobSpec:
    """A small float32 job; `parts` override, one level deep: trainer={"token_budget": 64}. Lists are taken whole.
    As a trainer gets it: from JSON, with every field."""
    tree: dict[str, Any] = {
        "name": "test",
        "output": str(model.parent / "output"),
        "model": {"path": str(model)},
        "data": {"procedural": "reasoning_gym:spell_backward", "max_prompt_tokens": 24},
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 24, "dtype": "float32"},
        "trainer": {"dtype": "float32", "token_budget": 128},
        "schedule": {"steps": 10, "prompts_per_step": 4},
    }
    for name, part in parts.items():
        tree[name] = part if isinstance(part, list) else {**tree.get(name, {}), **part}
    return received(parse(tree).model_dump_json())


def random_groups(
    prompts: int, samples: int, seed: int = 0, longest: int = 20, version: int = 0
) -> dict[str, common_pb2.Group]:
    """Groups by prompt id, with rewards 0 or 1 and behaviour log-probabilities near those of a random model; with the
    reward of a greedy answer, and a second reward, `format`."""
    random, beside = np.random.default_rng(seed), np.random.default_rng(seed + 1000)
    groups = {}
    for row in range(prompts):
        prompt_id = f"0-{seed}-{row}"
        groups[prompt_id] = common_pb2.Group(
            job_id="job-1",
            prompt_id=prompt_id,
            purpose=common_pb2.PURPOSE_TRAIN,
            prompt_tokens=pack_tokens(random.integers(0, BYTES, random.integers(3, longest)).tolist()),
            trajectories=[_trajectory(random, int(random.integers(1, longest)), version) for _ in range(samples)],
            greedy_reward=float(beside.integers(0, 2)),
        )
        for trajectory in groups[prompt_id].trajectories:
            trajectory.reward_details = json.dumps({"format": float(beside.random())})
    return groups


def _trajectory(random: np.random.Generator, length: int, version: int) -> common_pb2.Trajectory:
    return common_pb2.Trajectory(
        tokens=pack_tokens(random.integers(0, BYTES, length).tolist()),
        logprobs=pack_logprobs((-5.5 + 0.1 * random.standard_normal(length)).tolist()),
        versions=[common_pb2.VersionSpan(version=version, start=0, end=length)],
        stop_reason=common_pb2.STOP_REASON_END_OF_TURN,
        reward=float(random.integers(0, 2)),
    )


def episode_groups(
    prompts: int, episodes: int, seed: int = 0, longest: int = 20, version: int = 0
) -> dict[str, common_pb2.Group]:
    """Groups of agents by prompt id: episodes of one to three trajectories of one to three turns each, with tokens that
    were given before, between and after the turns, rewards of turns, and prompts of their own."""
    random, groups = np.random.default_rng(seed), random_groups(prompts, 0, seed, longest)
    for group in groups.values():
        for _ in range(episodes):
            count = int(random.integers(1, 4))
            group.episode_trajectories.append(count)
            group.trajectories.extend(_turns(random, longest, version) for _ in range(count))
            last = group.trajectories[-1]
            last.reward, last.reward_details = float(random.integers(0, 2)), json.dumps({"format": random.random()})
            for other in group.trajectories[-count:-1]:
                if random.random() < 0.5:
                    other.prompt_tokens = pack_tokens(random.integers(0, BYTES, random.integers(3, longest)).tolist())
    return groups


def _turns(random: np.random.Generator, longest: int, version: int) -> common_pb2.Trajectory:
    edges = np.sort(random.choice(longest, size=2 * int(random.integers(1, 4)), replace=False)).tolist()
    trajectory = _trajectory(random, int(random.integers(edges[-1], longest + 1)), version)
    for part in ("reward", "logprobs", "versions"):
        trajectory.ClearField(part)  # type: ignore[arg-type]
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        trajectory.turns.add(start=start, end=end, reward=float(random.integers(-2, 3)) / 4)
        trajectory.versions.add(version=version, start=start, end=end)
        trajectory.logprobs += pack_logprobs((-5.5 + 0.1 * random.standard_normal(end - start)).tolist())
    return trajectory


def refs(groups: dict[str, common_pb2.Group]) -> list[GroupRef]:
    """The groups as the coordinator names them, all of them shown."""
    return [
        group_ref(GroupSummary.of(group), shown=True) if group.episode_trajectories else _plain_ref(group)
        for group in groups.values()
    ]


def _plain_ref(group: common_pb2.Group) -> GroupRef:
    return GroupRef(
        prompt_id=group.prompt_id,
        prompt_tokens=len(group.prompt_tokens) // 4,
        response_tokens=[len(trajectory.tokens) // 4 for trajectory in group.trajectories],
        shown=True,
    )

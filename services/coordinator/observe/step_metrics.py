"""Metrics of a batch in verl's names."""

from collections.abc import Sequence
from math import comb

from millrace.ids import Version
from millrace.spec.job import JobSpec
from services.coordinator.state.group import Summary


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, max and min."""
    return {f"{name}/mean": mean(values), f"{name}/max": float(max(values)), f"{name}/min": float(min(values))}


def held_out(source: str, rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of a data source's prompts, each with the rewards of its n answers: their mean, and for k of 2, 4, ... n the
    expected best and worst of k of them, which for rewards of 0 and 1 is pass@k (Chen et al. 2021, arXiv:2107.03374).
    Those of n are among verl's `val-core`, the others among its `val-aux`. Here k answers are k different ones, where
    verl draws with replacement."""
    most = max(len(each) for each in rewards)
    found = {f"val-core/{source}/reward/mean@{most}": mean([reward for each in rewards for reward in each])}
    for k in sorted({most, *(2**i for i in range(1, most.bit_length()))} - {1}):
        enough = [sorted(each) for each in rewards if len(each) >= k]
        best = mean([_expected_last(each, k) for each in enough])
        worst = -mean([_expected_last([-reward for reward in reversed(each)], k) for each in enough])
        found[f"val-{'core' if k == most else 'aux'}/{source}/reward/best@{k}/mean"] = best
        found[f"val-aux/{source}/reward/worst@{k}/mean"] = worst
    return found


def _expected_last(ascending: Sequence[float], k: int) -> float:
    """The expected largest of k different ones."""
    ways = comb(len(ascending), k)
    return sum(value * comb(below, k - 1) for below, value in enumerate(ascending)) / ways


def batch_metrics(groups: Sequence[Summary], version: Version, spec: JobSpec) -> dict[str, float]:
    """What the coordinator itself knows of a batch trained at `version`."""
    rewards = [r for g in groups for r in g.rewards]
    responses = [float(n) for g in groups for n in g.response_tokens]
    prompts = [float(g.prompt_tokens) for g in groups]
    staleness = [float(version - oldest) for g in groups for oldest in g.oldest]
    tokens = sum(responses) + sum(g.prompt_tokens * len(g.response_tokens) for g in groups)
    longest = spec.data.max_prompt_tokens
    return {
        **spread("critic/score", rewards),
        **spread("critic/rewards", rewards),
        **spread("response_length", responses),
        "response_length/clip_ratio": sum(g.truncated for g in groups) / len(responses),
        **spread("prompt_length", prompts),
        "prompt_length/clip_ratio": mean([float(p >= longest) for p in prompts]),
        **spread("training/staleness", staleness),
        "training/groups_without_signal": float(sum(max(g.rewards) == min(g.rewards) for g in groups)),
        **spread("timing_s/generate", [g.generate_s for g in groups]),
        **spread("timing_s/score", [g.score_s for g in groups]),
        "perf/total_num_tokens": tokens,
    }


def step_seconds(values: dict[str, float], devices: int) -> dict[str, float]:
    """How long a step took from its parts, and its throughput over all `devices`, those of the replicas included."""
    parts = ("timing_s/gen", "timing_s/train", "timing_s/update_weights")
    seconds = sum(values.get(part, 0.0) for part in parts)
    throughput = values.get("perf/total_num_tokens", 0.0) / max(seconds, 1e-9) / max(devices, 1)
    return {"timing_s/step": seconds, "perf/time_per_step": seconds, "perf/throughput": throughput}

"""The step metrics that the coordinator computes, of the answers that a step was trained on and of those that it was
not, and the rows that hold all metrics of a step."""

import time
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from millrace.drops import without_signal
from millrace.ids import Version, pass_of
from millrace.rest import StepMetrics
from millrace.spec.job import JobSpec
from millrace.spec.passes import compared_rewards
from millrace.telemetry.metrics import catalogue
from millrace.telemetry.metrics.declaration import Owner
from millrace.telemetry.metrics.step.batch import STALE_TRAJECTORIES
from millrace.telemetry.metrics.step.performance import TOTAL_TOKENS
from millrace.telemetry.metrics.step.timing import PER_TOKEN, STEP_SECONDS, UPDATE_WEIGHTS
from services.coordinator.state.group import Account, GroupSummary


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of no values."""
    return sum(values) / len(values) if values else 0.0


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """`<name>/mean`, `<name>/max` and `<name>/min` of at least one value."""
    return {f"{name}/mean": mean(values), f"{name}/max": float(max(values)), f"{name}/min": float(min(values))}


def batch_metrics(groups: Sequence[GroupSummary], version: Version, spec: JobSpec) -> dict[str, float]:
    """Rewards, lengths, staleness and durations of the `groups` that a step was trained on at `version`. Stale
    trajectories are those of this step alone."""
    rewards = [r for g in groups for r in g.rewards]
    responses = [float(n) for g in groups for n in g.response_tokens]
    prompts = [float(g.prompt_tokens) for g in groups]
    staleness = [float(version - oldest) for g in groups for oldest in g.oldest]
    newest = [float(version - new) for g in groups for new in g.newest or g.oldest]
    tokens = float(sum(sum(g.lengths) for g in groups))
    compared = compared_rewards(spec)
    longest_prompt, longest_response = spec.data.max_prompt_tokens, spec.rollout.max_response_tokens
    return {
        **spread("critic/score", rewards),
        **reward_parts(groups),
        **spread("response_length", responses),
        "response/aborted_ratio": mean([float(n == 0) for n in responses]),
        "response_length/clip_ratio": mean([float(n >= longest_response) for n in responses]),
        **spread("prompt_length", prompts),
        "prompt_length/clip_ratio": mean([float(n >= longest_prompt) for n in prompts]),
        **spread("training/staleness", staleness),
        **spread("training/off_policy/trajectory_spans", [float(span + 1) for g in groups for span in g.spans]),
        **spread("training/off_policy/trajectory_staleness", newest),
        **spread("training/off_policy/trajectory_staleness_worst", staleness),
        STALE_TRAJECTORIES: float(sum(lag > 0 for lag in newest)),
        **spread("training/mean_staleness", [version - mean for g in groups for mean in g.means or g.oldest]),
        "training/epoch": float(max(pass_of(g.prompt_id) for g in groups)),
        "training/groups_without_signal": float(sum(without_signal(*g.compared(compared)) is not None for g in groups)),
        **spread("timing_s/generate", [g.generate_s for g in groups]),
        **spread("timing_s/score", [g.score_s for g in groups]),
        "timing_s/reward": max(g.score_s for g in groups),
        TOTAL_TOKENS: tokens,
        **episode_metrics(groups),
        **environment_metrics(groups),
        **missing_metrics(groups),
    }


def reward_parts(groups: Sequence[GroupSummary]) -> dict[str, float]:
    """The separate rewards that every group has."""
    found = [g.parts or {} for g in groups]
    names = [name for name in found[0] if all(name in parts for parts in found)]
    return {
        key: value
        for name in names
        for key, value in spread(f"rewards/{name}", [score for parts in found for score in parts[name]]).items()
    }


def episode_metrics(groups: Sequence[GroupSummary]) -> dict[str, float]:
    """Turns and trajectories of the episodes, and how much of the responses was sampled; nothing if all are plain
    answers."""
    if all(g.shapes is None for g in groups):
        return {}
    return {
        **spread("num_turns", [float(n) for g in groups for n in g.turns]),
        **spread("num_trajectories", [float(n) for g in groups for n in g.trajectories_of_episodes]),
        "response/sampled_ratio": sum(g.sampled_tokens for g in groups) / sum(sum(g.response_tokens) for g in groups),
    }


def environment_metrics(groups: Sequence[GroupSummary]) -> dict[str, float]:
    """Tools, limits and repeated runs of the episodes that had an environment; nothing if none had."""
    accounts = [account for g in groups for account in g.accounts or ()]
    if not accounts:
        return {}
    calls = [float(account.tool_calls) for account in accounts]
    return {
        **spread("tool_calls", calls),
        "tool_calls/failed_ratio": sum(account.tool_failures for account in accounts) / max(sum(calls), 1.0),
        **spread("timing_s/tools", [account.tool_s for account in accounts]),
        "episode/truncated_ratio": mean([float(not account.ended) for account in accounts]),
        "episode/rerun_ratio": mean([float(account.reruns > 0) for account in accounts]),
        **cache_metrics(accounts),
    }


def cache_metrics(accounts: Sequence[Account]) -> dict[str, float]:
    """What the engines' caches had of earlier turns, and how many episodes replicas had open because of that; what no
    engine told and no replica limited is left out."""
    values = {}
    if prefix := sum(account.prefix_tokens for account in accounts):
        values["episode/cached_prefix_ratio"] = sum(account.cached_prefix_tokens for account in accounts) / prefix
    if limited := [account for account in accounts if account.episode_limit]:
        values["episode/limit"] = mean([float(account.episode_limit) for account in limited])
        values["episode/open"] = mean([float(account.open_episodes) for account in limited])
        values["timing_s/held_back"] = mean([account.held_back_s for account in limited])
    return values


def missing_metrics(groups: Sequence[GroupSummary]) -> dict[str, float]:
    """Episodes that were asked for and are in no group; nothing if none is missing."""
    cancelled, failed = sum(g.cancelled for g in groups), sum(g.failed for g in groups)
    if not cancelled + failed:
        return {}
    asked = sum(len(g.rewards) for g in groups) + cancelled + failed
    return {"episode/cancelled_ratio": cancelled / asked, "episode/failed_ratio": failed / asked}


def milliseconds_per_token(values: Mapping[str, float], groups: Sequence[GroupSummary]) -> dict[str, float]:
    """`timing_per_token_ms/<part>` of each part of a step in PER_TOKEN that `values` has, as verl counts tokens.

    Generation is divided by the sampled tokens of the `groups`, every other part by prompt and response tokens, a
    prompt counted once for each of its responses.
    """
    responses, tokens = sum(g.sampled_tokens for g in groups), sum(sum(g.lengths) for g in groups)
    return {
        f"timing_per_token_ms/{part}": values[f"timing_s/{part}"] * 1e3 / max(responses if part == "gen" else tokens, 1)
        for part in PER_TOKEN
        if f"timing_s/{part}" in values
    }


def step_seconds(values: Mapping[str, float], devices: int) -> dict[str, float]:
    """Duration of a step, the sum of its parts in `values`, its throughput in tokens a second and device, and the share
    in which the trainer waited for groups.

    `devices` are all of the trainer's and the replicas' together.
    """
    parts = ("timing_s/gen", "timing_s/train", UPDATE_WEIGHTS)
    seconds = sum(values.get(part, 0.0) for part in parts)
    throughput = values.get(TOTAL_TOKENS, 0.0) / max(seconds, 1e-9) / max(devices, 1)
    idle = values.get("timing_s/gen", 0.0) / max(seconds, 1e-9)
    return {
        STEP_SECONDS: seconds,
        "perf/time_per_step": seconds,
        "perf/throughput": throughput,
        "trainer/idle_ratio": idle,
    }


def step_row(
    step: int,
    own: Mapping[str, float],
    *,
    trainer: Mapping[str, float] | None = None,
    earlier: Mapping[str, float] | None = None,
) -> StepMetrics:
    """The row of a step, every key of it checked against its declaration in `millrace/telemetry/metrics`.

    `own` are values that the coordinator adds now, the replicas' among them, `trainer` those that the trainer reports,
    `earlier` the row as it was before, if there was one. Every row of a job is made here.
    """
    own = {"training/global_step": float(step), **own}
    catalogue.check(own, [Owner.COORDINATOR, Owner.REPLICA])
    catalogue.check(trainer or {}, [Owner.TRAINER], user_defined=True)
    return StepMetrics(step=step, time_s=time.time(), values={**(earlier or {}), **(trainer or {}), **own})


class Fate(StrEnum):
    """What becomes of a complete group when a step looks at it."""

    KEPT = "kept"
    """It can be trained, in this step or in a later one."""
    TOO_STALE = "too_stale"
    WITHOUT_SIGNAL = "without_signal"


class Lengths:
    """The complete groups that the step in progress has looked at. One that is left over is looked at by each step."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, float], tuple[Fate, GroupSummary]] = {}

    def add(self, group: GroupSummary, fate: Fate) -> None:
        """The step in progress has looked at a group. Looking again changes nothing."""
        self._seen[group.prompt_id, group.completed_s] = fate, group

    def metrics(self, trained: Sequence[GroupSummary]) -> dict[str, float]:
        """Means over the answers. The next step begins."""
        seen, self._seen = list(self._seen.values()), {}
        stale = [group for fate, group in seen if fate is Fate.TOO_STALE]
        spans = [(span, n) for g in trained for span, n in zip(g.spans, g.response_tokens, strict=True)]
        found = {
            "offered": [float(n) for _, g in seen for n in g.response_tokens],
            "too_stale": [float(n) for g in stale for n in g.response_tokens],
            "without_signal": [float(n) for f, g in seen if f is Fate.WITHOUT_SIGNAL for n in g.response_tokens],
            "carried": [float(n) for span, n in spans if span],
        }
        means = {f"response_length/{name}_mean": sum(of) / len(of) for name, of in found.items() if of}
        return {
            **means,
            "training/too_stale_groups": float(len(stale)),
            "fully_async/partial/total_partial_num": float(len(found["carried"])),
            "fully_async/partial/partial_ratio": len(found["carried"]) / max(len(spans), 1),
            "fully_async/partial/max_partial_span": float(max((span for span, _ in spans), default=0)),
        }


DRAWS = 1000
SEED = 42
"""Number of draws and seed of the bootstrap, as in verl."""
Indices = npt.NDArray[np.int64]


def held_out(source: str, groups: Sequence[GroupSummary]) -> dict[str, float]:
    """Metrics of one evaluation of the data source `source`, whose answers are in `groups`.

    They are of the reward, and of `acc` if the reward function gave every answer one; `val-core` has the latter
    then. With n answers to a prompt: their mean and standard deviation, and for k = 2, 4, ... and n the expected best
    and worst among k different answers; for values of 0 and 1 the best is pass@k (arXiv 2107.03374). verl draws the k
    answers with replacement instead. Where every answer has a `pred`, also the value of the majority of k answers.
    """
    values = _variables(groups)
    votes = [group.votes for group in groups if group.votes is not None]
    majorities = Majorities(votes) if len(votes) == len(groups) else None
    found: dict[str, float] = {}
    for variable, rows in values.items():
        most = max(map(len, rows))
        for name, value, is_main in _statistics(rows, most, majorities):
            section = "val-core" if is_main and variable == list(values)[-1] else "val-aux"
            found[f"{section}/{source}/{variable}/{name}"] = value
    return found


def main_values(groups: Sequence[GroupSummary]) -> list[float]:
    """The variable of `val-core` of every answer to the prompts of one data source."""
    return [value for row in list(_variables(groups).values())[-1] for value in row]


def _variables(groups: Sequence[GroupSummary]) -> dict[str, list[list[float]]]:
    """The values of each variable, a row for each prompt. The last variable is that of `val-core`."""
    values = {"reward": [group.rewards for group in groups]}
    accuracies = [group.accuracies for group in groups if group.accuracies is not None]
    if len(accuracies) == len(groups):
        values["acc"] = accuracies
    return values


def sizes(most: int) -> list[int]:
    """The numbers of answers that best, worst and majority are computed for, of `most` answers: 2, 4, ... and all."""
    return sorted({most, *(2**i for i in range(1, most.bit_length()))} - {1})


def _statistics(
    rows: Sequence[Sequence[float]], most: int, majorities: "Majorities | None"
) -> Iterator[tuple[str, float, bool]]:
    """Each metric of one variable, whose values are in `rows`, a row a prompt: its name, its value, and whether it is
    one of the main metrics of a variable."""
    yield f"mean@{most}", mean([value for row in rows for value in row]), True
    if most > 1:
        yield f"std@{most}", mean([float(np.std(row)) for row in rows]), False
    for k in sizes(most):
        enough = [sorted(row) for row in rows if len(row) >= k]
        yield f"best@{k}/mean", mean([_expected_last(row, k) for row in enough]), k == most
        lowest = mean([_expected_last([-value for value in reversed(row)], k) for row in enough])
        yield f"worst@{k}/mean", -lowest, False
        if majorities is not None:
            winners = zip(rows, majorities.of(k), strict=True)
            drawn = [np.array(row)[chosen] for row, chosen in winners if len(row) >= k]
            yield f"maj@{k}/mean", mean([float(values.mean()) for values in drawn]), k == most
            yield f"maj@{k}/std", mean([float(values.std()) for values in drawn]), k == most


def _expected_last(ascending: Sequence[float], k: int) -> float:
    """Expected largest of k different values drawn from `ascending`, at least k values in ascending order."""
    return sum(value * share for value, share in zip(ascending, _shares_of_largest(len(ascending), k), strict=True))


@lru_cache(maxsize=64)
def _shares_of_largest(count: int, k: int) -> list[float]:
    """For each of `count` values in ascending order, the share of the draws of k different ones whose largest it is:
    C(values below it, k − 1) / C(count, k). The binomials themselves would not fit into a float."""
    shares = [0.0] * count
    share = k / count
    for below in range(count - 1, k - 2, -1):
        shares[below] = share
        share *= (below - k + 1) / max(below, 1)
    return shares


class Majorities:
    """Which answer has the majority's vote among k answers to a prompt, drawn with replacement, for each draw."""

    def __init__(self, votes: Sequence[Sequence[str]]) -> None:
        """`votes` has the votes of each prompt's answers; equal texts are the same vote."""
        self._votes = [np.unique(row, return_inverse=True)[1].reshape(-1) for row in votes]
        self._found: dict[int, list[Indices]] = {}

    def of(self, k: int) -> list[Indices]:
        """For each prompt, the answer in each of `DRAWS` draws of k answers: the first with the most frequent vote. Of
        votes that are equally frequent, the one that was drawn first wins."""
        if k not in self._found:
            self._found[k] = [_winners(votes, k) for votes in self._votes]
        return self._found[k]


def _winners(votes: Indices, k: int) -> Indices:
    drawn = _draws(len(votes), k)
    kinds = int(votes.max()) + 1
    rows = np.arange(DRAWS)[:, None]
    counts = np.bincount((rows * kinds + votes[drawn]).ravel(), minlength=DRAWS * kinds).reshape(DRAWS, kinds)
    first = counts[rows, votes[drawn]].argmax(axis=1)
    winners: Indices = drawn[rows[:, 0], first]
    return winners


@lru_cache(maxsize=64)
def _draws(answers: int, k: int) -> Indices:
    """[DRAWS, k]: the answers in each draw, the same for every prompt and in every run, and the same as verl's."""
    return np.random.RandomState(SEED).choice(answers, size=(DRAWS, k), replace=True)

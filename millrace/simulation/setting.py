"""What is simulated: lengths, rates, limits and faults; and the rate of an engine that fits when its requests ran."""

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

ROUNDS = 5
"""How often the constants are fitted: how many requests ran at a step depends on how long the steps were."""
Floats = NDArray[np.float64]


class EngineRate(Protocol):
    """How fast an engine is."""

    def decode(self, running: float, context: float) -> float:
        """Seconds of a step that gives each of `running` requests one token. `context`: tokens of all of them
        together."""
        ...

    def prefill(self, tokens: float) -> float:
        """Seconds to read this number of given tokens."""
        ...


@dataclass(frozen=True)
class MeasuredRate:
    """Seconds of a step at measured numbers of running requests, with straight lines between and beyond them."""

    running: Sequence[float]
    """Ascending."""
    seconds: Sequence[float]
    prefill_token_s: float = 0.0

    def decode(self, running: float, context: float) -> float:
        if len(self.running) == 1 or running <= self.running[0]:
            return self.seconds[0]
        if running <= self.running[-1]:
            return float(np.interp(running, self.running, self.seconds))
        (x0, x1), (y0, y1) = self.running[-2:], self.seconds[-2:]
        return y1 + (running - x1) * max(0.0, y1 - y0) / (x1 - x0)

    def prefill(self, tokens: float) -> float:
        return tokens * self.prefill_token_s


@dataclass(frozen=True)
class TrainerRate:
    """How long a step of the trainer takes."""

    step_s: float = 0.0
    """Seconds of a step however many tokens it has: the optimizer, and what is computed once."""
    token_s: float = 0.0
    """Seconds of each token, those of prompts included."""
    part_s: float = 0.0
    """Seconds of each part that is taken."""


class Lengths(Protocol):
    """How long the answers are."""

    def of(self, prompt: int, sample: int, attempt: int) -> float:
        """Tokens of an answer, at least 1. `prompt` counts from 0, `attempt` how often the prompt was issued before."""
        ...


@dataclass(frozen=True)
class Cycled:
    """Answers of these lengths in turn: steps of as many answers have all of them. A prompt that is issued again gets
    other ones."""

    lengths: Sequence[float]
    samples: int

    def of(self, prompt: int, sample: int, attempt: int) -> float:
        place = prompt * self.samples + sample + attempt * (len(self.lengths) // 2 + 1)
        return self.lengths[place % len(self.lengths)]


@dataclass(frozen=True)
class Drawn:
    """Answers whose lengths are drawn from these. Of each `prompts` prompts the answers are spread evenly over the
    lengths, so that steps differ by little more than their longest answers."""

    lengths: Sequence[float]
    prompts: int
    samples: int
    seed: int = 0
    _blocks: dict[tuple[int, int], list[float]] = field(default_factory=dict, repr=False, compare=False)

    def of(self, prompt: int, sample: int, attempt: int) -> float:
        block, place = divmod(prompt, self.prompts)
        if (block, attempt) not in self._blocks:
            self._blocks[block, attempt] = self._drawn(random.Random(f"{self.seed} {block} {attempt}"))
        return self._blocks[block, attempt][place * self.samples + sample]

    def _drawn(self, rng: random.Random) -> list[float]:
        ascending, count = sorted(self.lengths), self.prompts * self.samples
        found = [ascending[int((part + rng.random()) / count * len(ascending))] for part in range(count)]
        rng.shuffle(found)
        return found


class StalenessOf(StrEnum):
    """What is bounded of an answer, as `schedule.staleness_of` has it."""

    OLDEST = "oldest"
    """How many versions its oldest token is behind."""
    MEAN = "mean"
    """How many its tokens are behind on average."""
    VERSIONS = "versions"
    """How many versions after its first one have sampled tokens of it."""


class TooStale(StrEnum):
    """What becomes of a group with an answer beyond the bound, as `schedule.too_stale` has it."""

    REGENERATE = "regenerate"
    DROP = "drop"
    TRAIN = "train"


class FaultKind(StrEnum):
    DIE = "die"
    """A replica is lost with what it holds; its prompts are issued again after `seconds`."""
    DRAIN = "drain"
    """A replica takes no new prompts, finishes what it holds, and leaves."""
    JOIN = "join"
    """A replica joins."""
    RESTART_TRAINER = "restart_trainer"
    """The trainer is away for `seconds`, and takes the step in progress from its beginning."""


@dataclass(frozen=True)
class Fault:
    time_s: float
    kind: FaultKind
    replica: int = 0
    """The replica that dies or drains, in the order in which they joined."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Setting:
    """A job on some machines."""

    prompts: int
    """Prompts of a step."""
    samples: int
    """Answers to each prompt."""
    lengths: Lengths
    engine: EngineRate
    trainer: TrainerRate
    prompt_tokens: float = 0.0
    prompt_s: float = 0.0
    """Seconds that reading a prompt takes beside those of its tokens: those of its images."""
    max_staleness: int = 0
    replicas: int = 1
    slots: int = 1024
    """Requests that a replica runs at a time."""
    cached_tokens: float = float("inf")
    """Tokens that the cache of a replica holds."""
    state_tokens: float = 0.0
    """Tokens that would take as much of the cache as the states of a request in recurrent layers."""
    weight: float = 1.0
    """Requests that each simulated one stands for, to simulate large jobs sooner."""
    publication_s: float = 0.0
    pause_s: float = 0.0
    """Seconds of a publication in which replicas do not generate."""
    recompute_cache: bool = False
    """Whether a publication lets running requests be read again."""
    score_s: float = 0.0
    """Seconds from a group's last token until it can be trained."""
    between_s: float = 0.0
    """Seconds of a step in which the job's loop does something else, such as saving."""
    streaming: bool = False
    """Whether the trainer takes groups while others of the step are generated."""
    carried_prompts: int = 0
    """Prompts in flight beyond what the staleness bound allows: what is not complete goes on in the next step."""
    staleness_of: StalenessOf = StalenessOf.OLDEST
    too_stale: TooStale = TooStale.REGENERATE
    wait_for_slow: bool = False
    """Whether a step takes the prompts that were issued first, and waits for them."""
    keep_partial: bool = False
    """Whether what a lost replica had generated of an answer is kept, and the answer goes on elsewhere."""
    lease_while_away: bool = False
    """Whether replicas begin prompts while the trainer is away."""
    faults: Sequence[Fault] = field(default_factory=tuple)


def reduced(setting: Setting, most_answers: int) -> Setting:
    """A job whose steps take about as long and have at most about `most_answers` answers: it has fewer replicas, or
    answers each of which stands for several."""
    times = setting.prompts * setting.samples / most_answers
    if times <= 1:
        return setting
    replicas = max(1, round(setting.replicas / times))
    prompts = max(1, round(setting.prompts / times))
    share = prompts / setting.prompts
    weight = setting.weight * (replicas / setting.replicas) / share
    trainer = replace(setting.trainer, token_s=setting.trainer.token_s / (share * weight / setting.weight))
    carried = round(setting.carried_prompts * share)
    return replace(
        setting, prompts=prompts, replicas=replicas, weight=weight, trainer=trainer, carried_prompts=carried, faults=()
    )


@dataclass(frozen=True)
class Request:
    """A request that an engine has completed."""

    replica: str
    start_s: float
    end_s: float
    tokens: float


def fitted_rate(requests: Iterable[Request]) -> MeasuredRate | None:
    """The line `a + b * running` of the seconds of a step of the engine that fits the requests best; None without
    requests.

    A request of n tokens lasts n steps, so its seconds are a * n + b * (running requests, summed over its steps).
    """
    by_replica: dict[str, list[Request]] = defaultdict(list)
    for request in requests:
        if request.tokens > 0 and request.end_s > request.start_s:
            by_replica[request.replica].append(request)
    if not by_replica:
        return None
    alone, more = 1.0, 0.0
    for _ in range(ROUNDS):
        parts = [_running(of_one, alone, more) for of_one in by_replica.values()]
        running, seconds, tokens = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        alone, more = _line(running, seconds / tokens, tokens)
    most = float(max(1.0, running.max()))
    return MeasuredRate((0.0, most), (alone, alone + more * most))


def _running(requests: Sequence[Request], alone: float, more: float) -> tuple[Floats, Floats, Floats]:
    """Each request's mean number of running requests at its steps, its seconds and its tokens."""
    starts, ends, tokens = np.array([(each.start_s, each.end_s, each.tokens) for each in requests]).T
    times = np.concatenate([starts, ends])
    changes = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
    order = np.argsort(times, kind="stable")
    times, counts = times[order], np.cumsum(changes[order])
    pieces = np.diff(times)
    steps = pieces / (alone + more * counts[:-1])

    def between(values: Floats) -> Floats:
        total = np.concatenate([[0.0], np.cumsum(values)])
        found: Floats = np.interp(ends, times, total) - np.interp(starts, times, total)
        return found

    return between(steps * counts[:-1]) / np.maximum(between(steps), 1e-12), ends - starts, tokens


def _line(x: Floats, y: Floats, weights: Floats) -> tuple[float, float]:
    """The weighted least squares line y = a + b x with a > 0 and b >= 0."""
    mean_x, mean_y = float(np.average(x, weights=weights)), float(np.average(y, weights=weights))
    spread = float(np.average((x - mean_x) ** 2, weights=weights))
    slope = float(np.average((x - mean_x) * (y - mean_y), weights=weights)) / spread if spread > 1e-9 else 0.0
    slope = max(0.0, slope)
    if mean_y - slope * mean_x <= 0:
        slope = 0.99 * mean_y / max(mean_x, 1e-9)
    return mean_y - slope * mean_x, slope

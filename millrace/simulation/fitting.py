"""The rate of an engine from when its requests ran."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.simulation.setting import MeasuredRate

ROUNDS = 5
"""How often the constants are fitted: how many requests ran at a step depends on how long the steps were."""
Floats = NDArray[np.float64]


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

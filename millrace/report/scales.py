"""Numbers on the axes of a chart, and points that stand for many."""

import math
from collections.abc import Sequence

Point = tuple[float, float]
"""Step and value, both finite."""


def ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """About `wanted` round numbers from `low` to `high`, which are finite and ordered."""
    if not high > low:
        return [low]
    raw = (high - low) / wanted
    if not math.isfinite(raw) or raw == 0.0:
        return [low, high]
    size = 10.0 ** math.floor(math.log10(raw))
    step = next((size * factor for factor in (1, 2, 5) if size * factor >= raw), size * 10)
    if not (step > 0 and math.isfinite(low / step)):
        return [low, high]
    first = math.ceil(low / step)
    values = (at * step for at in range(first, first + 2 * wanted + 2))
    found = [value for value in values if value <= high or math.isclose(value, high, abs_tol=step * 1e-9)]
    return found or [low, high]


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """The points, or `most` of them in their order: the first, the last, and the lowest and highest of equal parts."""
    if len(points) <= most:
        return list(points)
    parts = max(1, (most - 2) // 2)
    inner = points[1:-1]
    kept = [points[0]]
    for part in range(parts):
        found = inner[len(inner) * part // parts : len(inner) * (part + 1) // parts]
        if found:
            kept += sorted({min(found, key=lambda point: point[1]), max(found, key=lambda point: point[1])})
    return [*kept, points[-1]]


def smoothed(points: Sequence[Point], window: int) -> list[Point]:
    """The mean of the `window` points around each, of fewer at both ends."""
    half, sums = window // 2, [0.0]
    scale = max((abs(value) for _, value in points), default=0.0) or 1.0  # sums of very large values would be infinite
    for _, value in points:
        sums.append(sums[-1] + value / scale)
    means = []
    for at, (step, _) in enumerate(points):
        reach = min(half, at, len(points) - 1 - at)
        means.append((step, scale * ((sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1))))
    return means


def written(value: float) -> str:
    """`0.0123`, `12,345`, `1.2e-06`."""
    if value and math.isfinite(value) and (abs(value) >= 1e7 or abs(value) < 1e-4):
        return f"{value:.3g}"
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"

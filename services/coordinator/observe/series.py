"""Step metrics over a whole job as a limited number of points, for curves of jobs of any length.

A point stands for one step, or for several steps in a row with the mean, the least and the greatest value of each
metric. Points of `LEVELS` steps are kept in the store as soon as their steps are over, so that the curve of a long job
is drawn without reading its rows.
"""

import asyncio
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from pydantic_core import from_json

from millrace.rest import BandView, MetricView, SeriesView, StepMetrics
from millrace.telemetry.metrics import catalogue
from millrace.telemetry.metrics.step.performance import TOTAL_TOKENS
from services.coordinator.store.records import Records

LEVELS = (10, 100)
"""Steps of the points that are kept. Each level is a multiple of the one before."""
MOST_READ = 1500
"""Rows, or points of the finer level, that one request reads at most; beyond, it reads the next coarser level."""
DIGITS = 6
"""Significant digits of a value in a point."""


class Band(NamedTuple):
    """One metric in the steps of a point."""

    steps: int
    """Steps that have the metric."""
    mean: float
    """NaN if a value was not finite."""
    least: float
    greatest: float


@dataclass(frozen=True)
class Point:
    """Consecutive steps as one point of every curve."""

    last: int
    """The last of the steps."""
    time_s: float
    """Unix time of the last step."""
    tokens: float
    """Prompt and response tokens that the steps were trained on."""
    values: Mapping[str, Band]

    @classmethod
    def of_row(cls, row: StepMetrics, keys: Collection[str] | None = None) -> Self:
        """The point of one step, with the metrics `keys`; None: all."""
        named = row.values if keys is None else {key: row.values[key] for key in keys if key in row.values}
        values = {key: Band(1, value, value, value) for key, value in named.items()}
        return cls(row.step, row.time_s, row.values.get(TOTAL_TOKENS, 0.0), values)

    @classmethod
    def merged(cls, points: Sequence[Self]) -> Self:
        """One point for the steps of all `points`, of which there is at least one."""
        found: dict[str, list[Band]] = {}
        for point in points:
            for key, band in point.values.items():
                found.setdefault(key, []).append(band)
        values = {key: _together(bands) for key, bands in found.items()}
        return cls(points[-1].last, points[-1].time_s, sum(point.tokens for point in points), values)

    def to_json(self) -> str:
        values = {key: [band.steps, *map(_short, band[1:])] for key, band in self.values.items()}
        return json.dumps({"last": self.last, "time_s": self.time_s, "tokens": self.tokens, "values": values})

    @classmethod
    def from_json(cls, data: bytes, keys: Collection[str] | None = None) -> Self:
        tree = from_json(data)
        values = tree["values"]
        named = values if keys is None else {key: values[key] for key in keys if key in values}
        return cls(tree["last"], tree["time_s"], tree["tokens"], {key: Band(*band) for key, band in named.items()})


def _together(bands: Sequence[Band]) -> Band:
    count = sum(band.steps for band in bands)
    mean = sum(band.mean * band.steps for band in bands) / count
    if not math.isfinite(mean):
        return Band(count, math.nan, math.nan, math.nan)
    return Band(count, mean, min(band.least for band in bands), max(band.greatest for band in bands))


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


async def points(
    records: Records, first: int, last: int, newest: int, keys: Collection[str] | None = None
) -> list[Point]:
    """Points of the steps from `first` to `last`, in order, with the metrics `keys` (None: all). `newest` is the last
    step of the job. A point that is not kept yet and whose steps are over is kept for later requests."""
    steps = last - first + 1
    size = next((s for s, level in zip((1, *LEVELS), LEVELS, strict=False) if steps <= MOST_READ * s), LEVELS[-1])
    if size == 1:
        rows = await records.rows(first - 1, last)
        return [Point.of_row(row, keys) for row in rows]
    starts = range(first - first % size, last + 1, size)
    kept = await records.series([name(size, start) for start in starts])
    read = await asyncio.to_thread(_decoded, kept, keys)
    found: list[Point] = []
    for start, point in zip(starts, read, strict=True):
        if point is None:
            point = await _made(records, size, start, newest, keys)
        if point is not None:
            found.append(point)
    return found


def _decoded(kept: Sequence[bytes | None], keys: Collection[str] | None) -> list[Point | None]:
    return [None if data is None else Point.from_json(data, keys) for data in kept]


async def _made(records: Records, size: int, start: int, newest: int, keys: Collection[str] | None) -> Point | None:
    """The point of `size` steps from `start`, made from their rows; None if there are none."""
    end = start + size - 1
    rows = await records.rows(start - 1, min(end, newest))
    if not rows:
        return None
    if end < newest:
        point = Point.merged([Point.of_row(row) for row in rows])
        await records.set_series({name(size, start): point.to_json()})
        await records.add_metric_keys(point.values.keys())
    return Point.merged([Point.of_row(row, keys) for row in rows])


def name(size: int, start: int) -> str:
    """The store's name of the point of `size` steps from `start`; it ends with the last of them."""
    return f"{size}:{start + size - 1}"


async def keep(records: Records, step: int) -> None:
    """Keeps the points whose last step is the one before `step`, which has just been trained."""
    for size in LEVELS:
        if step and step % size == 0 and (await records.series([name(size, step - size)]))[0] is None:
            await _made(records, size, step - size, step, ())


async def make_again(records: Records, step: int, newest: int) -> None:
    """Makes the points that are kept and stand for `step` among others again: its row has changed."""
    for size in LEVELS:
        if (start := step - step % size) + size - 1 < newest:
            await _made(records, size, start, newest, ())


async def series(records: Records, keys: Sequence[str], first: int, last: int, newest: int, most: int) -> SeriesView:
    """Curves of the metrics `keys` from step `first` to `last` with at most `most` points."""
    found = await points(records, first, last, newest, keys)
    together = max(1, math.ceil(len(found) / most))
    if together > 1:
        found = [Point.merged(found[at : at + together]) for at in range(0, len(found), together)]
    bands = {key: [point.values.get(key) for point in found] for key in keys}
    return SeriesView(
        steps=[point.last for point in found],
        time_s=[point.time_s for point in found],
        tokens=[point.tokens for point in found],
        metrics={key: _band_view(own) for key, own in bands.items()},
    )


def _band_view(bands: Sequence[Band | None]) -> BandView:
    single = all(band is None or band.steps == 1 for band in bands)
    return BandView(
        mean=[None if band is None else band.mean for band in bands],
        least=[] if single else [None if band is None else band.least for band in bands],
        greatest=[] if single else [None if band is None else band.greatest for band in bands],
    )


async def metrics(records: Records, newest: int) -> list[MetricView]:
    """Every metric that a step of the job has, in the order of docs/metrics.md."""
    found = await records.metric_keys()
    first = newest - newest % LEVELS[0] if found else 0  # those of the steps before were noted as their point was kept
    for point in await points(records, first, newest, newest):
        found |= point.values.keys()
    return sorted(_described(found), key=lambda metric: (_ORDER.get(metric.section, len(_ORDER)), metric.key))


_ORDER = {section.heading: number for number, section in enumerate(catalogue.SECTIONS)}
_SECTION = {metric: section.heading for section in catalogue.SECTIONS for metric in section.metrics}
OTHERS = "Others"
"""Heading of the metrics that this release does not declare."""


def _described(keys: Iterable[str]) -> list[MetricView]:
    views = []
    for key in keys:
        metric = catalogue.find(key)
        views.append(
            MetricView(
                key=key,
                section=OTHERS if metric is None else _SECTION[metric],
                unit="" if metric is None else metric.unit,
                meaning="" if metric is None else metric.meaning,
            )
        )
    return views

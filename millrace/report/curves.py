"""Charts as inline SVG: metrics over the steps."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from millrace.report.markup import Element, element
from millrace.report.scales import Point, smoothed, thinned, ticks, written

WIDTH, HEIGHT = 380, 190
LEFT, RIGHT, TOP, BOTTOM = 54, 10, 8, 22
"""Margins around the area of the curves."""
MOST_POINTS = 400
HOVERED_POINTS = 120
"""Points of a curve that tell their step and value where the pointer rests on them."""
LARGEST = sys.float_info.max
SMOOTHED_FROM = 40
"""Points from which on a mean over their neighbours is drawn above the curve."""


@dataclass(frozen=True)
class Curve:
    """One metric over the steps, with the lowest and highest values around it where there are any."""

    name: str
    points: Sequence[Point]
    low: Sequence[Point] = ()
    high: Sequence[Point] = ()
    not_finite: Sequence[float] = field(default=())
    """Steps in which the value was NaN or infinite."""


def curve(name: str, rows: Sequence[tuple[int, Mapping[str, float]]], key: str, band: tuple[str, str] | None) -> Curve:
    """The metric `key` of the rows, which are steps with their values. `band`: the keys of its minimum and maximum."""

    def points(of: str) -> list[Point]:
        return [(float(step), values[of]) for step, values in rows if math.isfinite(values.get(of, math.nan))]

    broken = [float(step) for step, values in rows if key in values and not math.isfinite(values[key])]
    low, high = (points(band[0]), points(band[1])) if band else ([], [])
    return Curve(name, points(key), low, high, broken)


@dataclass(frozen=True)
class Area:
    """The part of the chart that has the curves, and the steps and values that it spans."""

    steps: tuple[float, float]
    values: tuple[float, float]

    @classmethod
    def of(cls, curves: Sequence[Curve]) -> "Area":
        every = [point for one in curves for point in (*one.points, *one.low, *one.high)]
        steps = [step for step, _ in every] + [step for one in curves for step in one.not_finite]
        values = [value for _, value in every]
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        margin = (high / 2 - low / 2) * 0.1 or abs(high) * 0.1 or 0.5
        return cls((min(steps), max(steps)), (max(low - margin, -LARGEST), min(high + margin, LARGEST)))

    def x(self, step: float) -> float:
        low, high = self.steps
        share = (step - low) / (high - low) if high > low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.values
        share = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5  # halves: no overflow
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def path(self, points: Sequence[Point]) -> str:
        return " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in points)


def chart(title: str, meaning: str, unit: str, curves: Sequence[Curve]) -> Element | None:
    """A figure with the curves; None where none has a value. The title shows `meaning` under the pointer."""
    curves = [one for one in curves if one.points or one.not_finite]
    if not curves:
        return None
    area = Area.of(curves)
    drawn = [part for number, one in enumerate(curves) for part in _drawn(one, area, number, len(curves))]
    label = "; ".join(_told(one) for one in curves)
    svg = element("svg", *_axes(area), *drawn, view_box=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)
    heading = element("span", title, class_="name", title=meaning)
    last = f"{written(curves[0].points[-1][1])}" if len(curves) == 1 and curves[0].points else ""
    caption = [heading, element("span", unit, class_="unit"), element("span", last, class_="last")]
    if len(curves) > 1:
        caption += [element("span", one.name, class_=f"key c{n % 6}") for n, one in enumerate(curves)]
    return element("figure", element("figcaption", *caption), svg)


def _told(one: Curve) -> str:
    """The curve in words, for those who do not see it."""
    if not one.points:
        return f"{one.name}: no finite value"
    (first, start), (last, end) = one.points[0], one.points[-1]
    lowest, highest = (pick(value for _, value in one.points) for pick in (min, max))
    course = f"{written(start)} in step {written(first)}, {written(end)} in step {written(last)}"
    return f"{one.name}: {course}, lowest {written(lowest)}, highest {written(highest)}"


def _axes(area: Area) -> list[Element]:
    parts = []
    for value in ticks(*area.values):
        y = f"{area.y(value):.1f}"
        parts.append(element("line", x1=str(LEFT), x2=str(WIDTH - RIGHT), y1=y, y2=y, class_="grid"))
        parts.append(element("text", written(value), x=str(LEFT - 5), y=y, dy="3.5", class_="tick end"))
    for step in dict.fromkeys(int(step) for step in ticks(*area.steps)):
        x = f"{area.x(step):.1f}"
        parts.append(element("text", written(step), x=x, y=str(HEIGHT - 6), class_="tick middle"))
    return parts


def _drawn(one: Curve, area: Area, number: int, of: int) -> list[Element]:
    colour = f"c{number % 6}"
    parts = []
    if one.low and one.high:
        around = [*thinned(one.high, MOST_POINTS), *reversed(thinned(one.low, MOST_POINTS))]
        parts.append(element("polygon", points=area.path(around), class_=f"band {colour}"))
    smooth = len(one.points) >= SMOOTHED_FROM and of == 1
    shown = thinned(one.points, MOST_POINTS)
    parts.append(element("polyline", points=area.path(shown), class_=f"{colour}{' faint' if smooth else ''}"))
    if smooth:
        mean = thinned(smoothed(one.points, len(one.points) // 20), MOST_POINTS)
        parts.append(element("polyline", points=area.path(mean), class_=colour))
    for step, value in thinned(one.points, HOVERED_POINTS):
        where = {"cx": f"{area.x(step):.1f}", "cy": f"{area.y(value):.1f}"}
        hint = element("title", f"{one.name}, step {written(step)}: {written(value)}")
        single = " single" if len(one.points) == 1 else ""
        parts.append(element("circle", hint, r="3", class_=f"point {colour}{single}", **where))
    for step in one.not_finite[:MOST_POINTS]:
        hint = element("title", f"{one.name}, step {written(step)}: not finite")
        x = f"{area.x(step):.1f}"
        parts.append(element("line", hint, x1=x, x2=x, y1=str(TOP), y2=str(HEIGHT - BOTTOM), class_="broken"))
    return parts

"""Histograms of a job's steps: those of the coordinator, how they are stored, and those of some steps to look at."""

import json
from collections.abc import Mapping, Sequence

from pydantic_core import from_json

from millrace.contracts.v1 import trainer_pb2
from millrace.ids import Version
from millrace.rest import HistogramView
from millrace.telemetry.metrics.declaration import Owner
from millrace.telemetry.metrics.histograms import (
    RESPONSE_LENGTHS,
    SCORES,
    STALENESS,
    STEP_HISTOGRAMS,
    STEPS_KEPT,
    Histogram,
    StepHistogram,
    declared,
)
from services.coordinator.state.group import GroupSummary
from services.coordinator.store.records import Records

DIGITS = 6
"""Significant digits of an edge."""


def of_groups(groups: Sequence[GroupSummary], version: Version) -> dict[str, Histogram]:
    """The histograms of the groups that a step was trained on at `version`."""
    values: dict[StepHistogram, list[float] | list[int]] = {
        SCORES: [reward for group in groups for reward in group.rewards],
        RESPONSE_LENGTHS: [tokens for group in groups for tokens in group.response_tokens],
        STALENESS: [version - oldest for group in groups for oldest in group.oldest],
    }
    made = {declaration.key: declaration.of(own) for declaration, own in values.items()}
    return declared({key: histogram for key, histogram in made.items() if histogram is not None}, Owner.COORDINATOR)


def of_trainer(answer: trainer_pb2.StepResponse) -> dict[str, Histogram]:
    """The histograms in the trainer's answer. One without a count for each of its bins is left out."""
    made = {key: Histogram(tuple(each.edges), tuple(each.counts)) for key, each in answer.histograms.items()}
    whole = {key: histogram for key, histogram in made.items() if len(histogram.edges) == len(histogram.counts) + 1}
    return declared(whole, Owner.TRAINER)


def to_json(histograms: Mapping[str, Histogram]) -> str:
    """The histograms of a step as they are stored: by key, edges and counts."""
    stored = {key: [[float(f"{e:.{DIGITS}g}") for e in one.edges], one.counts] for key, one in histograms.items()}
    return json.dumps(stored, separators=(",", ":"))


async def views(records: Records, first: int, last: int, newest: int, most: int) -> list[HistogramView]:
    """The histograms of up to `most` steps from `first` to `last`, spread evenly, the last step among them. `newest` is
    the last step of the job."""
    steps = range(max(first, newest - STEPS_KEPT + 1), last + 1)
    count = min(most, len(steps))
    chosen = [steps[(len(steps) * (number + 1)) // count - 1] for number in range(count)]
    found = await records.histograms(chosen)
    trees = {step: from_json(data) for step, data in zip(chosen, found, strict=True) if data is not None}
    views = []
    for declaration in STEP_HISTOGRAMS:
        own = {step: tree[declaration.key] for step, tree in trees.items() if declaration.key in tree}
        if own:
            view = HistogramView(
                key=declaration.key,
                unit=declaration.unit,
                meaning=declaration.meaning,
                fixed=declaration.edges is not None,
                whole_numbers=declaration.whole_numbers,
                steps=list(own),
                edges=[edges for edges, _ in own.values()],
                counts=[counts for _, counts in own.values()],
            )
            views.append(view)
    return views

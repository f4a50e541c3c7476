"""Samples as the rows of a table, for trackers that show tables."""

import json
from collections.abc import Sequence

from millrace.rest import SampleView

Cell = str | int | float | None
COLUMNS = (
    "step",
    "purpose",
    "prompt_id",
    "episode",
    "prompt",
    "answer",
    "ground_truth",
    "reward",
    "reward_failure",
    "advantage",
    "stop_reason",
    "tokens",
    "versions",
    "member",
)


def rows(samples: Sequence[SampleView]) -> list[list[Cell]]:
    """One row for each sample, with a value for each of COLUMNS. Values that are lists or mappings are JSON."""
    return [[_cell(getattr(sample, column)) for column in COLUMNS] for sample in samples]


def _cell(value: object) -> Cell:
    if value is None or isinstance(value, str | int | float):
        return value
    return json.dumps(value, ensure_ascii=False)

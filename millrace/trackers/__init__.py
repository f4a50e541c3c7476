"""Experiment trackers: services such as TensorBoard that get a copy of a job's step metrics and samples.

`check_trackers` is called at submission and `open_trackers` when a job starts. Then `Tracker.log` and
`Tracker.log_samples` are called after each step and `Tracker.close` at the end. A new tracker is one file with a class
that has these three methods, and one line in `TRACKERS`.
"""

import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import SecretStr

from millrace.errors import InvalidJob
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


@dataclass(frozen=True)
class TrackedJob:
    """The job whose metrics a tracker gets."""

    job_id: str
    name: str
    project: str
    folder: Path
    """The job's output folder, for local files."""
    spec: Mapping[str, Any]
    """The job spec as JSON."""
    offline: bool = False
    """Whether a tracker that usually sends to a server writes into `folder` instead."""
    api_key: SecretStr | None = None
    """The key of the tracker's server; None: the tracker looks in the environment."""


class Tracker(Protocol):
    """A connection to one experiment tracker."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records the metrics of one step. Steps come in ascending order; those that are trained again come again."""

    def log_samples(self, step: int, samples: Sequence[SampleView]) -> None:
        """Records samples of the step, after its metrics. A tracker without a place for texts does nothing here."""

    def close(self) -> None:
        """Sends everything that is buffered, and ends."""


@dataclass(frozen=True)
class TrackerEntry:
    """A tracker by names, so that it is imported only when a job uses it."""

    module: str
    factory: str
    package: str
    """The package that it imports."""
    distribution: str = ""
    """The name under which the package is installed; empty: the same name."""


TRACKERS: dict[str, TrackerEntry] = {
    "jsonl": TrackerEntry("millrace.trackers.jsonl", "JsonLines", "json"),
    "mlflow": TrackerEntry("millrace.trackers.mlflow", "MLflow", "mlflow", "mlflow-skinny"),
    "tensorboard": TrackerEntry("millrace.trackers.tensorboard", "TensorBoard", "tensorboard"),
    "wandb": TrackerEntry("millrace.trackers.wandb", "WeightsAndBiases", "wandb"),
}

WITH_KEY = "wandb"
"""The tracker that takes `tracking.api_key`."""


def check_trackers(names: Sequence[str]) -> None:
    """Raises InvalidJob if a tracker is unknown or its package is not installed in this process."""
    for name in names:
        if name not in TRACKERS:
            known = ", ".join(sorted(TRACKERS))
            raise InvalidJob(f"tracking.trackers: there is no tracker {name!r}.", f"choose from {known}.")
        entry = TRACKERS[name]
        if importlib.util.find_spec(entry.package) is None:
            package = entry.distribution or entry.package
            raise InvalidJob(
                f"tracking.trackers: {name!r} needs the package {package}, which the coordinator does not have.",
                f"install it on the coordinator's host (`uv pip install {package}`), or leave the tracker out.",
            )


def open_trackers(names: Sequence[str], job: TrackedJob) -> list[Tracker]:
    """Opens the trackers `names` for `job`. Raises InvalidJob like `check_trackers`, and whatever a tracker raises."""
    check_trackers(names)
    return [getattr(importlib.import_module(TRACKERS[n].module), TRACKERS[n].factory)(job) for n in names]


def rows(samples: Sequence[SampleView]) -> list[list[Cell]]:
    """One row for each sample, with a value for each of COLUMNS. Values that are lists or mappings are JSON."""
    return [[_cell(getattr(sample, column)) for column in COLUMNS] for sample in samples]


def _cell(value: object) -> Cell:
    if value is None or isinstance(value, str | int | float):
        return value
    return json.dumps(value, ensure_ascii=False)

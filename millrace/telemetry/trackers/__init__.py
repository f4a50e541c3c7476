"""Experiment trackers: services such as TensorBoard that get a copy of a job's step metrics.

`check(names)` at submission, `opened(names, run)` once a job starts, `log(step, values)` after each step, `close()`.
A new tracker is one file with a class that has these two methods and one line in `TRACKERS`.
"""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from millrace.errors import InvalidJob


@dataclass(frozen=True)
class Run:
    """What a tracker is told about the job that it follows."""

    job_id: str
    name: str
    project: str
    folder: Path
    """For local files; under the job's output folder."""
    spec: Mapping[str, Any]


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records the metrics of one step. Steps come in ascending order."""

    def close(self) -> None:
        """Writes out what is buffered."""


@dataclass(frozen=True)
class Entry:
    """A tracker, named so that nothing is imported before a job asks for it."""

    module: str
    factory: str
    package: str
    """What has to be installed."""


TRACKERS: dict[str, Entry] = {
    "tensorboard": Entry("millrace.telemetry.trackers.tensorboard", "TensorBoard", "tensorboard"),
    "wandb": Entry("millrace.telemetry.trackers.wandb", "WeightsAndBiases", "wandb"),
}


def check(names: Sequence[str]) -> None:
    """Raises InvalidJob where a tracker is unknown or its package is not installed in this process."""
    for name in names:
        if name not in TRACKERS:
            known = ", ".join(sorted(TRACKERS))
            raise InvalidJob(f"tracking.trackers: there is no tracker {name!r}.", f"choose from {known}.")
        package = TRACKERS[name].package
        if importlib.util.find_spec(package) is None:
            raise InvalidJob(
                f"tracking.trackers: {name!r} needs the package {package}, which the coordinator does not have.",
                f"install it beside the coordinator (`uv pip install {package}`), or leave the tracker out.",
            )


def opened(names: Sequence[str], run: Run) -> list[Tracker]:
    """The job's trackers, ready to log. Raises InvalidJob as `check` does."""
    check(names)
    return [getattr(importlib.import_module(TRACKERS[n].module), TRACKERS[n].factory)(run) for n in names]

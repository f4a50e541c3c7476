"""How long a job runs, how far generation may run ahead, what is kept, and when something is given up."""

from typing import Annotated

from pydantic import Field

from millrace.telemetry.trackers import TRACKERS
from millrace.validation.fields import OneOf
from millrace.validation.model import StrictModel


class Schedule(StrictModel):
    steps: int | None = Field(None, ge=0)
    """Steps to train; none: as many as `passes` over the data give. 0: the model is only evaluated."""
    passes: int = Field(1, ge=1)
    """Passes over the data, unless `steps` says otherwise (then the data is repeated as often as needed)."""
    prompts_per_step: int = Field(64, ge=1)
    """Groups trained in a step."""
    max_staleness: int = Field(1, ge=0)
    """Versions that a trajectory's oldest token may be behind the trainer; 0: strictly on-policy."""
    save_every_steps: int = Field(0, ge=0)
    """Checkpoints. The last step is saved always; 0, or more than there are steps: it alone."""
    keep_checkpoints: int = Field(2, ge=1)
    """So many of the newest stay."""
    save_in_background: bool = True
    """Train on while a checkpoint is written from a copy in host memory (12 bytes a parameter, over all ranks); false:
    wait for the disk."""


class Deadlines(StrictModel):
    """Seconds after which a remote operation is given up, named and retried or failed. See millrace/wire/deadlines.py
    for those that no job needs to change."""

    configure_s: float = Field(1800.0, gt=0)
    """Loading the model, in the trainer and in an engine."""
    step_s: float = Field(3600.0, gt=0)
    """A step of the trainer."""
    publication_s: float = Field(300.0, gt=0)
    """The transfer of new weights, and their verification."""
    save_s: float = Field(3600.0, gt=0)
    """A checkpoint."""
    no_replica_s: float = Field(1800.0, gt=0)
    """How long a job waits with no replica in the fleet before it fails."""


class Tracking(StrictModel):
    trackers: list[Annotated[str, OneOf(tuple(TRACKERS))]] = Field(default_factory=list, examples=[["tensorboard"]])
    """They come with the `trackers` extra, beside the coordinator: docs/running.md."""
    project: str = "millrace"
    """W&B's."""
    samples_per_step: int = Field(4, ge=0)
    """Groups of each step kept for GET /v1/jobs/{id}/samples."""

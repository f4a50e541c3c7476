"""The job spec: one tree, everything that a user says about a job."""

from typing import Self

from pydantic import Field, model_validator

from millrace.spec.algorithm import Algorithm
from millrace.spec.model import Data, Evaluation, Model, Reward
from millrace.spec.publication import Publication
from millrace.spec.rollout import Rollout
from millrace.spec.schedule import Deadlines, Schedule, Tracking
from millrace.spec.trainer import Trainer
from millrace.validation.model import Part


class JobSpec(Part):
    name: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$")
    """For people: at most 100 letters, digits, `.`, `_`, `-` and spaces."""
    output: str
    """Folder for checkpoints and the report, as a whole path, the same for coordinator and trainer."""
    model: Model
    """What is trained."""
    data: Data
    """What it is asked."""
    reward: Reward = Reward()
    """How its answers are scored."""
    rollout: Rollout = Rollout()
    """How they are generated."""
    algorithm: Algorithm = Algorithm()
    """What is optimised."""
    trainer: Trainer = Trainer()
    """How it is trained."""
    publication: Publication = Publication()
    """How new weights come to the replicas."""
    schedule: Schedule = Schedule()
    """How long it runs, how far generation may run ahead, what is kept."""
    evaluation: Evaluation | None = None
    """Held-out prompts that it is asked beside training; none: it is not evaluated."""
    deadlines: Deadlines = Deadlines()
    """When something is given up."""
    tracking: Tracking = Tracking()
    """Which experiment trackers get its step metrics."""

    @model_validator(mode="after")
    def fits_together(self) -> Self:
        from millrace.spec.rules import broken_rules

        if broken := broken_rules(self):
            raise ValueError("\n".join(broken))
        return self

"""The job spec: one tree, everything that a user says about a job."""

from typing import Self

from pydantic import Field, model_validator

from millrace.spec.algorithm import Algorithm
from millrace.spec.base import Part
from millrace.spec.model import Data, Evaluation, Model, Reward
from millrace.spec.publication import Publication
from millrace.spec.rollout import Rollout
from millrace.spec.schedule import Deadlines, Schedule, Tracking
from millrace.spec.trainer import Trainer


class JobSpec(Part):
    name: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$")
    output: str
    """Folder for checkpoints and the report, at the same path for coordinator and trainer."""
    model: Model
    data: Data
    reward: Reward = Reward()
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()
    trainer: Trainer = Trainer()
    publication: Publication = Publication()
    schedule: Schedule = Schedule()
    evaluation: Evaluation | None = None
    deadlines: Deadlines = Deadlines()
    tracking: Tracking = Tracking()

    @model_validator(mode="after")
    def fits_together(self) -> Self:
        from millrace.spec.rules import broken_rules

        if broken := broken_rules(self):
            raise ValueError("\n".join(broken))
        return self

"""The diagnosis of a job as REST answers it."""

from enum import StrEnum

from pydantic import BaseModel, Field

from millrace.rest.timeline import IdleCause
from millrace.telemetry.metrics.declaration import Unit


class Bottleneck(StrEnum):
    """What slows a job down."""

    GENERATION = "generation"
    """The engines generate all the time and are too slow for the trainer."""
    LONG_TAIL = "long_tail"
    """Few long answers, or one slow replica, keep everybody waiting."""
    REWARDS = "rewards"
    """Groups wait for their scores."""
    ENVIRONMENT = "environment"
    """Episodes wait for environments and tools."""
    TRAINER = "trainer"
    """The trainer trains all the time and is too slow for the engines."""
    PUBLICATION = "publication"
    """New weights take long to reach the replicas."""
    QUEUE = "queue"
    """Prompts wait in the queue, and no replica takes them."""
    MEMORY = "memory"
    """Something is slow because memory is short."""
    STALENESS_BOUND = "staleness_bound"
    """Generation and training take turns, because `schedule.max_staleness` allows no overlap."""
    EVALUATION = "evaluation"
    """Held-out prompts are scored often or for long."""
    CHECKPOINT = "checkpoint"
    """The job waits for checkpoints."""


class FigureView(BaseModel):
    """A number that speaks for a finding."""

    name: str
    value: float
    unit: Unit
    meaning: str


class ChangeView(BaseModel):
    """What may help."""

    setting: str = Field(description="A field of the job's spec; empty if it is none of the job's.")
    advice: str


class FindingView(BaseModel):
    """Something that slows the job down."""

    bottleneck: Bottleneck
    share: float = Field(description="Part of the steps' time that would be saved at most without it, from 0 to 1.")
    seconds: float = Field(description="Seconds of a step, on average, in which the job waited for it.")
    message: str = Field(description="For people: what was found, in one sentence.")
    member: str = Field("", description="The member that causes it; empty: no single one.")
    figures: list[FigureView]
    changes: list[ChangeView] = Field(description="What to change, the most helpful first.")


REPLICAS = "replicas"
"""A forecast of another number of replicas, which no field of the spec has."""


class ForecastView(BaseModel):
    """What a step would take with another setting, by simulation with the job's own lengths and rates."""

    setting: str = Field(description="A field of the job's spec; `replicas`: their number.")
    value: int | bool
    step_s: float = Field(description="Mean seconds of a step.")


class DiagnosisView(BaseModel):
    """What slows a job down, and what to change."""

    job_id: str
    from_step: int
    to_step: int
    step_s: float = Field(description="Mean seconds of a step.")
    bottleneck: Bottleneck | None = Field(description="The first finding's; null: nothing slows the job down much.")
    findings: list[FindingView] = Field(description="The one that costs most first.")
    loop_s: dict[IdleCause, float] = Field(
        description="Seconds of a step by what its loop was at; `trainer` is training. They add up to `step_s`."
    )
    simulated_s: float | None = Field(
        None, description="Seconds of a step as the job is, simulated; null: it cannot be simulated."
    )
    forecasts: list[ForecastView] = Field(
        [], description="Settings that save time. None if `simulated_s` and `step_s` differ by more than a quarter."
    )
    from_spans: bool = Field(description="false: no spans are kept, so that it rests on step metrics alone.")

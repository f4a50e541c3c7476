"""The timeline as REST answers it: one lane for each service and for what it works on, spans in it, and idle time."""

from enum import StrEnum

from pydantic import BaseModel, Field

from millrace.telemetry.spans.kinds import LaneKind, SpanKind


class IdleCause(StrEnum):
    """Why a trainer or a replica did nothing for the job."""

    STARTING = "starting"
    """The job begins: models are loaded, or the first version is published."""
    GENERATION = "generation"
    """The trainer waits for samples, and most of the engines that serve the job are busy."""
    LONG_TAIL = "long_tail"
    """Few samples or one replica are still generating, while the rest has nothing to do."""
    REWARDS = "rewards"
    """Groups are generated and wait for their scores."""
    ENVIRONMENT = "environment"
    """Episodes wait for environments or tools."""
    QUEUE = "queue"
    """Prompts wait in the queue, and no replica takes them."""
    TRAINER = "trainer"
    """A replica has no prompts, because the trainer has not finished a step and the staleness bound allows no more."""
    STALENESS_BOUND = "staleness_bound"
    """Replicas have no prompts while others still generate, because the staleness bound allows no more."""
    PUBLICATION = "publication"
    """New weights are published."""
    EVALUATION = "evaluation"
    """Held-out prompts are scored."""
    CHECKPOINT = "checkpoint"
    """A checkpoint is copied or written."""
    COORDINATION = "coordination"
    """The coordinator issues prompts, keeps its ledger, or sends metrics to trackers."""
    UNKNOWN = "unknown"
    """No span says why."""


class SpanView(BaseModel):
    """What a service did, from when to when."""

    kind: SpanKind
    start_s: float = Field(description="Unix time of its begin, by the clock of the service's host.")
    end_s: float = Field(description="Unix time of its end.")
    step: int | None = Field(None, description="Step that it belongs to, 0 before the first; null: not known yet.")
    group: str = Field("", description="Id of the prompt whose group it belongs to; empty: none.")
    detail: str = Field("", description="What more the kind does not say, such as the name of a tool.")
    attributes: dict[str, float] = Field({}, description="Numbers by name, such as tokens and bytes.")
    trace_id: str = Field(description="Trace, 32 hexadecimal digits: the same as in an OTLP collector.")
    span_id: str = Field(description="16 hexadecimal digits.")
    parent_id: str = Field("", description="The span that it is a part of; empty: it is the root of its trace.")


class IdleView(BaseModel):
    """Time in which a service did nothing for the job."""

    start_s: float
    end_s: float
    cause: IdleCause


class LaneView(BaseModel):
    """What one service did in the window."""

    member: str = Field(description="Id of the member; `coordinator` for the coordinator.")
    kind: LaneKind
    spans: list[SpanView] = Field(description="In the order of their begin. Spans may lie within others and overlap.")
    idle: list[IdleView] = Field([], description="Only of a trainer and of replicas.")
    idle_s: dict[IdleCause, float] = Field({}, description="Seconds of idle time by cause.")


class TimelineView(BaseModel):
    """What all services did for a job during some of its steps."""

    job_id: str
    from_step: int
    to_step: int
    start_s: float = Field(description="Unix time at which the first of the steps began.")
    end_s: float = Field(description="Unix time at which the last one ended, or now.")
    lanes: list[LaneView] = Field(description="Coordinator, trainer, replicas, then their rewards and environments.")
    dropped_spans: int = Field(description="Spans of these steps that were not kept, because there were too many.")
    kept_from_step: int = Field(description="First step whose spans are still kept.")

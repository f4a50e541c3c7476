"""What the coordinator's REST API speaks, for the coordinator and the client alike."""

import json
from enum import StrEnum
from math import isfinite
from typing import Annotated, Any

from pydantic import BaseModel, Field, PlainSerializer

Figure = Annotated[
    float, PlainSerializer(lambda value: value if isfinite(value) else json.dumps(value), float | str, when_used="json")
]
"""A number that may be infinite or none at all. JSON has no such numbers: there it is a text, "NaN" or "-Infinity"."""


class JobState(StrEnum):
    QUEUED = "queued"
    """Waits for the fleets, or for the jobs before it."""
    STARTING = "starting"
    """Trainer and replicas load the model; the first evaluation runs."""
    RUNNING = "running"
    PAUSED = "paused"
    """Between two steps: nothing is issued, nothing is lost."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class JobView(BaseModel):
    id: str
    name: str
    state: JobState
    step: int = Field(description="Steps trained.")
    steps: int = Field(description="Steps the job will train; 0 until its data was read.")
    version: int = Field(description="Weight version that the trainer holds.")
    reward: float | None = Field(description="Mean reward of the last step's trajectories.")
    evaluation_before: float | None = Field(description="Held-out reward at version 0.")
    evaluation_last: float | None = Field(description="Held-out reward of the last evaluation.")
    created_s: float = Field(description="Unix time.")
    finished_s: float | None = None
    checkpoint: str | None = Field(description="Folder of the last checkpoint.")
    report: str | None = Field(description="The report that a finished job leaves in its output folder.")
    failure: str | None = None
    spec: dict[str, Any]


class LedgerView(BaseModel):
    """Where every prompt of the job stands. issued is the sum of the others."""

    issued: int = Field(description="Prompts issued since the job began.")
    queued: int = Field(description="In the queue, leased by nobody.")
    leased: int
    generated: int = Field(description="Complete groups that wait to be trained.")
    trained: int
    dropped: int
    reasons: dict[str, int] = Field(description="Dropped prompts by reason.")


class MemberView(BaseModel):
    id: str
    kind: str = Field(description="trainer or rollout")
    address: str
    engine: str
    engine_release: str
    world_size: int
    host: str
    device: str
    state: str = Field(description="configuring, joining, serving, draining, lost")
    version: int = Field(description="Weight version held; -1: none verified.")
    running: int
    waiting: int
    free: int
    leases: int
    tokens: int
    tokens_per_s: float
    silent_s: float = Field(description="Seconds since the last heartbeat.")
    trouble: str = Field("", description="Why it could not be made ready for the job.")


class FleetView(BaseModel):
    epoch: int
    trainers: list[MemberView]
    replicas: list[MemberView]


class StepMetrics(BaseModel):
    """The metrics of one step, under verl's names."""

    step: int
    time_s: float
    values: dict[str, Figure]


class SampleView(BaseModel):
    step: int
    prompt_id: str
    purpose: str
    prompt: str
    answer: str
    ground_truth: Any
    reward: float | None
    reward_failure: str | None
    stop_reason: str
    tokens: int
    versions: list[int] = Field(description="Weight versions of the answer's tokens, oldest first.")
    member: str


class Problem(BaseModel):
    """An error, RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    fix: str

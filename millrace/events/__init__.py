"""The events of a job: each kind with its payload, declared once for coordinator, store, REST, client and page.

A new kind of event is one member of `EventKind`, one payload model in the file of its subject, and its name in
`Payload` and `__all__`. The message of an event is for people; programs read its kind and its payload:

    for event in client.events(job.id):
        if isinstance(event.data, events.StepDone):
            print(event.data.step, event.data.reward)
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, computed_field, model_validator

from millrace.events.job import (
    CheckpointBest,
    CheckpointCopied,
    CheckpointCopyFailed,
    CheckpointFailed,
    CheckpointSaved,
    DataOpened,
    JobMoved,
    JobRewound,
    JobStopping,
    JobWaiting,
    ReportFailed,
    StopCause,
    TrackerFailed,
    WebhookFailed,
)
from millrace.events.kind import EventData, EventKind
from millrace.events.members import (
    HandOverReason,
    MemberConfigured,
    MemberDied,
    MemberFailed,
    MemberHandedOver,
    MemberJoined,
    MemberJoining,
    MemberOut,
    ReplicasScaled,
    ScalingReason,
    TrainerConfigured,
    TrainerConfiguring,
    TrainerLeft,
    TrainerLost,
    TrainerOutOfMemory,
)
from millrace.events.training import (
    MEMBERS_LISTED,
    EvaluationDone,
    GroupDropped,
    GroupStale,
    LeaseExpired,
    MemberTransfer,
    PromptDropped,
    PublicationDone,
    PublicationFailed,
    PublicationPhase,
    PublishedContent,
    Source,
    StepDone,
    TrainingWarning,
)

__all__ = [
    "MEMBERS_LISTED",
    "CheckpointBest",
    "CheckpointCopied",
    "CheckpointCopyFailed",
    "CheckpointFailed",
    "CheckpointSaved",
    "DataOpened",
    "EvaluationDone",
    "Event",
    "EventData",
    "EventKind",
    "GroupDropped",
    "GroupStale",
    "HandOverReason",
    "JobMoved",
    "JobRewound",
    "JobStopping",
    "JobWaiting",
    "LeaseExpired",
    "MemberConfigured",
    "MemberDied",
    "MemberFailed",
    "MemberHandedOver",
    "MemberJoined",
    "MemberJoining",
    "MemberOut",
    "MemberTransfer",
    "OtherRelease",
    "Payload",
    "PromptDropped",
    "PublicationDone",
    "PublicationFailed",
    "PublicationPhase",
    "PublishedContent",
    "ReplicasScaled",
    "ReportFailed",
    "ScalingReason",
    "Source",
    "StepDone",
    "StopCause",
    "TrackerFailed",
    "TrainerConfigured",
    "TrainerConfiguring",
    "TrainerLeft",
    "TrainerLost",
    "TrainerOutOfMemory",
    "TrainingWarning",
    "WebhookFailed",
]


class OtherRelease(BaseModel):
    """A kind of event, or a payload, that this release does not know: the coordinator is of another release."""

    model_config = ConfigDict(frozen=True, extra="allow")

    kind: str


Payload = (
    JobMoved
    | JobWaiting
    | JobRewound
    | JobStopping
    | DataOpened
    | TrainerConfiguring
    | TrainerConfigured
    | TrainerLost
    | TrainerLeft
    | TrainerOutOfMemory
    | MemberJoined
    | MemberConfigured
    | MemberFailed
    | MemberJoining
    | MemberHandedOver
    | MemberOut
    | MemberDied
    | ReplicasScaled
    | PromptDropped
    | LeaseExpired
    | GroupStale
    | GroupDropped
    | StepDone
    | TrainingWarning
    | PublicationDone
    | PublicationFailed
    | EvaluationDone
    | CheckpointSaved
    | CheckpointBest
    | CheckpointFailed
    | CheckpointCopied
    | CheckpointCopyFailed
    | TrackerFailed
    | ReportFailed
    | WebhookFailed
)
"""What the coordinator can emit."""


class Event(BaseModel):
    """One entry of a job's event log."""

    id: str = Field(description="Ids grow: `Last-Event-ID` and `Client.events(after=…)` take one.")
    time_s: float = Field(description="Unix time.")
    message: str = Field(description="For people. Programs read `kind` and `data`.")
    data: Annotated[Annotated[Payload, Field(discriminator="kind")] | OtherRelease, Field(union_mode="left_to_right")]

    @computed_field  # type: ignore[prop-decorator]  # mypy has no decorated properties (python/mypy#1362)
    @property
    def kind(self) -> EventKind | str:
        """Which payload this is; plain text if the coordinator is of another release."""
        return self.data.kind

    @model_validator(mode="before")
    @classmethod
    def _kind_in_data(cls, tree: Any) -> Any:
        """The kind is also given next to the payload; the event logs of release 0.1 have it only there."""
        if isinstance(tree, Mapping) and "kind" in tree and isinstance(tree.get("data", {}), Mapping):
            return {**tree, "data": {"kind": tree["kind"], **tree.get("data", {})}}
        return tree

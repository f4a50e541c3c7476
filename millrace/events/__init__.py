"""The events of a job: each kind with its payload, declared once for coordinator, store, REST, client and page.

A new kind of event is one member of `EventKind`, one payload model in the file of its subject, its import here and its
name in `Payload`. The message of an event is for people; programs read its kind and its payload:

    for event in client.events(job.id):
        if isinstance(event.data, events.StepDone):
            print(event.data.step, event.data.reward)
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, computed_field, model_validator

from millrace.events.job import CheckpointBest as CheckpointBest
from millrace.events.job import CheckpointCopied as CheckpointCopied
from millrace.events.job import CheckpointCopyFailed as CheckpointCopyFailed
from millrace.events.job import CheckpointFailed as CheckpointFailed
from millrace.events.job import CheckpointSaved as CheckpointSaved
from millrace.events.job import DataOpened as DataOpened
from millrace.events.job import JobMoved as JobMoved
from millrace.events.job import JobRewound as JobRewound
from millrace.events.job import JobStopping as JobStopping
from millrace.events.job import JobWaiting as JobWaiting
from millrace.events.job import ReportFailed as ReportFailed
from millrace.events.job import StopCause as StopCause
from millrace.events.job import TrackerFailed as TrackerFailed
from millrace.events.job import WebhookFailed as WebhookFailed
from millrace.events.kind import EventData as EventData
from millrace.events.kind import EventKind as EventKind
from millrace.events.members import HandOverReason as HandOverReason
from millrace.events.members import MemberConfigured as MemberConfigured
from millrace.events.members import MemberDied as MemberDied
from millrace.events.members import MemberFailed as MemberFailed
from millrace.events.members import MemberHandedOver as MemberHandedOver
from millrace.events.members import MemberJoined as MemberJoined
from millrace.events.members import MemberJoining as MemberJoining
from millrace.events.members import MemberOut as MemberOut
from millrace.events.members import ReplicasScaled as ReplicasScaled
from millrace.events.members import ScalingReason as ScalingReason
from millrace.events.members import TrainerConfigured as TrainerConfigured
from millrace.events.members import TrainerConfiguring as TrainerConfiguring
from millrace.events.members import TrainerLeft as TrainerLeft
from millrace.events.members import TrainerLost as TrainerLost
from millrace.events.members import TrainerOutOfMemory as TrainerOutOfMemory
from millrace.events.training import MEMBERS_LISTED as MEMBERS_LISTED
from millrace.events.training import EvaluationDone as EvaluationDone
from millrace.events.training import GroupDropped as GroupDropped
from millrace.events.training import GroupStale as GroupStale
from millrace.events.training import LeaseExpired as LeaseExpired
from millrace.events.training import MemberTransfer as MemberTransfer
from millrace.events.training import PromptDropped as PromptDropped
from millrace.events.training import PublicationDone as PublicationDone
from millrace.events.training import PublicationFailed as PublicationFailed
from millrace.events.training import PublicationPhase as PublicationPhase
from millrace.events.training import PublishedContent as PublishedContent
from millrace.events.training import Source as Source
from millrace.events.training import StepDone as StepDone
from millrace.events.training import TrainingWarning as TrainingWarning


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

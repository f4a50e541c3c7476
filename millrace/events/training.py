"""Payloads: from prompts and groups to trained steps, and publications of weights."""

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from millrace.drops import DropReason
from millrace.events.kind import EventData, EventKind
from millrace.ids import LeaseId, MemberId, PromptId
from millrace.rest import Figure, WarningCause

PublicationPhase = Literal["prepare", "transfer", "verify", "commit"]
Source = Literal["trainer", "sibling"]
"""Who sends the weights: the trainer, or a replica that serves them already."""
PublishedContent = Literal["model", "base", "adapter"]
"""What a publication consists of, as `Content` of the manifest."""


class PromptDropped(EventData):
    """A prompt produced no usable samples: its data row is bad, or a replica refused it."""

    kind: Literal[EventKind.PROMPT_DROPPED] = EventKind.PROMPT_DROPPED
    reason: DropReason = Field(DropReason.UNSPECIFIED, description="Unspecified in event logs of release 0.1.")
    prompt: PromptId | None = Field(None, description="Known if the data row is bad, or replicas died.")
    lease: LeaseId | None = Field(None, description="Known if a replica refused the prompt.")
    member: MemberId | None = Field(None, description="The replica that refused the prompt.")


class LeaseExpired(EventData):
    """Leases were not extended in time; their prompts go to other replicas."""

    kind: Literal[EventKind.LEASE_EXPIRED] = EventKind.LEASE_EXPIRED
    prompts: Sequence[PromptId] = Field(description="The first 50.")


class GroupStale(EventData):
    """Groups are older than the staleness bound allows; their prompts are issued again."""

    kind: Literal[EventKind.GROUP_STALE] = EventKind.GROUP_STALE
    prompts: Sequence[PromptId] = Field(description="The first 50.")


class GroupDropped(EventData):
    """Groups without a training signal were dropped."""

    kind: Literal[EventKind.GROUP_DROPPED] = EventKind.GROUP_DROPPED
    reason: DropReason
    prompts: Sequence[PromptId] = Field(description="The first 50.")


class StepDone(EventData):
    """A step was trained."""

    kind: Literal[EventKind.STEP_DONE] = EventKind.STEP_DONE
    step: int
    reward: Figure = Field(description="Mean reward of the step's trajectories.")
    seconds: Figure = Field(description="Duration of the trainer's step, without the wait for groups.")


class TrainingWarning(EventData):
    """Training goes wrong for several steps. Told once for each time that the trouble begins."""

    kind: Literal[EventKind.TRAINING_WARNING] = EventKind.TRAINING_WARNING
    cause: WarningCause
    metric: str = Field(description="Step metric that shows it.")
    value: Figure = Field(description="Its value in the last step; a count of groups as a share of them.")
    limit: Figure = Field(description="What the value is compared with; for equal rewards their largest difference.")
    steps: int = Field(description="For how many steps in a row.")


class EvaluationDone(EventData):
    """The held-out prompts were scored."""

    kind: Literal[EventKind.EVALUATION_DONE] = EventKind.EVALUATION_DONE
    step: int
    version: int
    metrics: dict[str, Figure]


class MemberTransfer(BaseModel):
    """What one member moved in a publication, and how long each part took there."""

    model_config = ConfigDict(frozen=True)

    member: MemberId
    bytes: int
    prepare_s: Figure
    gather_s: Figure = Field(description="Sender only: collecting whole tensors from the trainer's ranks.")
    wire_s: Figure = Field(description="Time inside the channel's calls.")
    verify_s: Figure
    apply_s: Figure = Field(description="Receiver only: writing the engine's parameters.")
    pause_s: Figure = Field(description="Receiver only: how long generation was paused.")
    loader_tensors: int = Field(description="Tensors that went through the engine's own loader.")
    loader_bytes: int
    staging_bytes: int = Field(description="Extra memory for the transfer, on the rank that needs most.")
    mode: int = Field(description="`CommitMode` of the protocol: 1 is shadow, 2 is in place.")
    loader_names: list[str] = Field(description="Tensors that went through the engine's own loader; the first 64.")
    sent_bytes: int = Field(0, description="Sender only: bytes that all its ranks sent.")
    changed: Figure = Field(
        0.0, description="Sender only, where changes alone are sent: part of the 16-bit words that changed, 0 to 1."
    )
    code_s: Figure = Field(
        0.0, description="Where changes alone are sent: comparing and encoding them, or decoding them."
    )
    snapshot_bytes: int = Field(
        0, description="Sender only: host memory that keeps what was sent, on the rank that has most."
    )
    idle_ratio: Figure | None = Field(
        None,
        description="Receiver only: share of the time since the version before in which no sample was in its engine.",
    )


MEMBERS_LISTED = 32
"""Members that the event of a publication lists at most."""


class PublicationDone(EventData):
    """Replicas serve a version of the weights."""

    kind: Literal[EventKind.PUBLICATION_DONE] = EventKind.PUBLICATION_DONE
    version: int
    epoch: int
    attempt: int
    content: PublishedContent = Field(
        "model",
        description="model: the whole model. adapter: the adapter alone. base: the model without its adapter, which a"
        " replica gets once and does not serve until the adapter follows.",
    )
    source: Source
    failures: int = Field(description="Failed attempts before this one.")
    seconds: Figure = Field(description="Duration of the whole publication, failed attempts included.")
    phases: dict[str, Figure] = Field(description="Seconds by phase.")
    receivers: int = Field(default=0, description="Number of receivers that serve the version now.")
    members: list[MemberTransfer] = Field(
        description="The sender, then receivers that serve the version: of more than 31 those that took longest."
    )


class PublicationFailed(EventData):
    """An attempt at a publication failed, or a replica failed in it. The replicas at fault are taken out."""

    kind: Literal[EventKind.PUBLICATION_FAILED] = EventKind.PUBLICATION_FAILED
    version: int
    epoch: int
    attempt: int
    source: Source
    phase: PublicationPhase
    culprits: list[str] = Field(description="Ids or addresses of the members at fault; empty if that is not known.")

"""Payloads: from prompts and groups to trained steps."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from millrace.drops import DropReason
from millrace.events.kind import EventData, EventKind
from millrace.ids import LeaseId, MemberId, PromptId
from millrace.rest import Figure, WarningCause


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

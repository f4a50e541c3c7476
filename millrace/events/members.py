"""Payloads: how the trainer and the replicas come, work and leave."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Literal

from pydantic import Field

from millrace.events.kind import EventData, EventKind
from millrace.ids import MemberId, PromptId


class TrainerConfiguring(EventData):
    """The trainer begins to load the model or a checkpoint."""

    kind: Literal[EventKind.TRAINER_CONFIGURING] = EventKind.TRAINER_CONFIGURING
    member: MemberId


class TrainerConfigured(EventData):
    """The trainer has loaded the model or a checkpoint."""

    kind: Literal[EventKind.TRAINER_CONFIGURED] = EventKind.TRAINER_CONFIGURED
    member: MemberId
    version: int = Field(description="Weight version that it holds.")
    warnings: list[str] = Field(
        [],
        description="Fields with a better value: those with which ranks of different hosts exchange more than need be, "
        "and those with which an adapter learns more slowly.",
    )
    whole_steps: str = Field(
        "",
        description="Why it gets all groups of a step at once; empty if it gets them as they are completed "
        "(`trainer.streaming`).",
    )
    stood_by: bool = Field(
        False, description="Whether it held the job before it got the seat, as a trainer that stood by."
    )


class TrainerLost(EventData):
    """The trainer died or does not answer. The job waits for a trainer and continues."""

    kind: Literal[EventKind.TRAINER_LOST] = EventKind.TRAINER_LOST
    step: int = Field(description="Steps trained so far.")
    setbacks: int = Field(description="How many times in a row the trainer was lost at this step.")


class TrainerLeft(EventData):
    """The trainer was drained or stopped. The job waits for a trainer and continues."""

    kind: Literal[EventKind.TRAINER_LEFT] = EventKind.TRAINER_LEFT
    member: MemberId
    step: int = Field(description="Steps trained so far.")


class TrainerOutOfMemory(EventData):
    """A rank of the trainer had no memory left. The step is made again with a smaller token budget, which the job keeps
    (`trainer.on_out_of_memory: halve_budget`)."""

    kind: Literal[EventKind.TRAINER_OUT_OF_MEMORY] = EventKind.TRAINER_OUT_OF_MEMORY
    step: int = Field(description="The step that is made again.")
    token_budget_before: int = Field(description="Tokens in a micro-batch so far.")
    token_budget: int = Field(description="Tokens in a micro-batch from now on.")


class MemberJoined(EventData):
    """A replica registered and is being configured for the job."""

    kind: Literal[EventKind.MEMBER_JOINED] = EventKind.MEMBER_JOINED
    member: MemberId
    epoch: int = Field(description="Membership epoch of the fleet.")
    pool: str = Field("rollout", description="The pool of the replica.")


class MemberConfigured(EventData):
    """A replica's engine is ready. One that generates still needs the current weights."""

    kind: Literal[EventKind.MEMBER_CONFIGURED] = EventKind.MEMBER_CONFIGURED
    member: MemberId
    engine: str
    pool: str = Field("rollout", description="The pool of the replica.")
    kept_engine: bool = Field(False, description="It has the engine of the job before: nothing was started or loaded.")
    engine_changes: list[str] = Field(
        default_factory=list, description="Fields in which the job before needed another engine."
    )


class MemberFailed(EventData):
    """A replica could not be configured for the job, or refused it."""

    kind: Literal[EventKind.MEMBER_FAILED] = EventKind.MEMBER_FAILED
    member: MemberId
    refused: bool = Field(
        False, description="Whether it refused the job as invalid. The job fails if every connected replica does."
    )
    pool: str = Field("rollout", description="The pool of the replica.")


class MemberJoining(EventData):
    """Replicas without weights are being sent the current version."""

    kind: Literal[EventKind.MEMBER_JOINING] = EventKind.MEMBER_JOINING
    members: Sequence[MemberId]
    sender: str = Field(description="Member id of the trainer or of the replica that sends the weights.")


class HandOverReason(StrEnum):
    """Why a replica goes from one partition to another."""

    FIRST = "first"
    """The job there has no replica."""
    SHARE = "share"
    """The shares of the running jobs are others than what they have: one has begun, ended, or changed."""
    DEMAND = "demand"
    """The job there has work for it, and the one here keeps its trainer fed without it."""
    REFUSED = "refused"
    """It refused the job here."""


class MemberHandedOver(EventData):
    """A replica goes over to the job of another partition. It returns its leases with what they have got; they go to
    other replicas of its job. Both jobs get this event."""

    kind: Literal[EventKind.MEMBER_HANDED_OVER] = EventKind.MEMBER_HANDED_OVER
    member: MemberId
    before: str = Field(description="The partition that it leaves.")
    partition: str = Field(description="The partition that it works in from now on.")
    reason: HandOverReason


class MemberOut(EventData):
    """A replica left or was lost; its leases go to other replicas."""

    kind: Literal[EventKind.MEMBER_OUT] = EventKind.MEMBER_OUT
    member: MemberId
    prompts: Sequence[PromptId] = Field(description="Prompts whose leases it held; the first 50.")


class MemberDied(EventData):
    """A member died while it worked for the job, which is charged with the death; or its next life reported how it
    ended. The message has its last words."""

    kind: Literal[EventKind.MEMBER_DIED] = EventKind.MEMBER_DIED
    member: MemberId
    deaths: int | None = Field(
        None, description="Replicas: deaths in a row at its address, with no completed group in between."
    )


class ScalingReason(StrEnum):
    """Why another number of replicas is wanted."""

    TRAINER_WAITS = "trainer_waits"
    """The trainer waits for groups, and more replicas would generate them sooner."""
    REPLICAS_IDLE = "replicas_idle"
    """Fewer replicas keep the trainer fed."""
    NO_GAIN = "no_gain"
    """The last increase did not make steps faster and is taken back."""
    WORK = "work"
    """A job needs a replica, and none is wanted."""
    NO_WORK = "no_work"
    """No job has needed replicas for a while."""
    BUDGET = "budget"
    """The replicas cost more than the budget."""
    LIMITS = "limits"
    """Somebody changed the limits."""


class ReplicasScaled(EventData):
    """Autoscaling wants another number of replicas."""

    kind: Literal[EventKind.REPLICAS_SCALED] = EventKind.REPLICAS_SCALED
    pool: str = Field("rollout", description="The pool whose replicas these are.")
    before: int = Field(description="Replicas that were wanted so far.")
    wanted: int = Field(description="Replicas that are wanted from now on.")
    reason: ScalingReason
    ready: int = Field(description="Replicas that serve.")
    trainer_waits: float = Field(description="Share of the time in which the trainer waited for groups, 0 to 1.")
    replicas_busy: float = Field(description="Share of the time in which a replica generated, on average, 0 to 1.")

"""The events of a job: each kind with its payload, declared once for coordinator, store, REST, client and page.

A new kind of event is one member of `EventKind`, one payload model, and one name in `Payload`. The message of an event
is for people; programs read its kind and its payload:

    for event in client.events(job.id):
        if isinstance(event.data, events.StepDone):
            print(event.data.step, event.data.reward)
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field, model_validator

from millrace.drops import DropReason
from millrace.ids import LeaseId, MemberId, PromptId
from millrace.rest import Figure, JobState, WaitingFor, WarningCause

PublicationPhase = Literal["prepare", "transfer", "verify", "commit"]
Source = Literal["trainer", "sibling"]
"""Who sends the weights: the trainer, or a replica that serves them already."""
PublishedContent = Literal["model", "base", "adapter"]
"""What a publication consists of, as `Content` of the manifest."""

StopCause = Literal["solved", "flat"]


class EventKind(StrEnum):
    JOB_STATE = "job.state"
    JOB_WAITING = "job.waiting"
    JOB_REWOUND = "job.rewound"
    JOB_STOPPING = "job.stopping"
    DATA_OPENED = "data.opened"
    TRAINER_CONFIGURING = "trainer.configuring"
    TRAINER_CONFIGURED = "trainer.configured"
    TRAINER_LOST = "trainer.lost"
    TRAINER_OUT_OF_MEMORY = "trainer.out_of_memory"
    MEMBER_JOINED = "member.joined"
    MEMBER_CONFIGURED = "member.configured"
    MEMBER_FAILED = "member.failed"
    MEMBER_JOINING = "member.joining"
    MEMBER_OUT = "member.out"
    MEMBER_DIED = "member.died"
    PROMPT_DROPPED = "prompt.dropped"
    LEASE_EXPIRED = "lease.expired"
    GROUP_STALE = "group.stale"
    GROUP_DROPPED = "group.dropped"
    STEP_DONE = "step.done"
    TRAINING_WARNING = "training.warning"
    PUBLICATION_DONE = "publication.done"
    PUBLICATION_FAILED = "publication.failed"
    EVALUATION_DONE = "evaluation.done"
    CHECKPOINT_SAVED = "checkpoint.saved"
    CHECKPOINT_BEST = "checkpoint.best"
    CHECKPOINT_FAILED = "checkpoint.failed"
    TRACKER_FAILED = "tracker.failed"
    REPORT_FAILED = "report.failed"


class EventData(BaseModel):
    """Base of all payloads. Fields of another release are ignored."""

    model_config = ConfigDict(frozen=True)


class JobMoved(EventData):
    """The job has another state. The first event of a job, and the last of one that has ended."""

    kind: Literal[EventKind.JOB_STATE] = EventKind.JOB_STATE
    state: JobState


class JobWaiting(EventData):
    """The job waits for something, and has done so for some seconds."""

    kind: Literal[EventKind.JOB_WAITING] = EventKind.JOB_WAITING
    reason: WaitingFor


class JobRewound(EventData):
    """The trainer holds older weights than the ledger has counted; the steps since then are trained again."""

    kind: Literal[EventKind.JOB_REWOUND] = EventKind.JOB_REWOUND
    version: int = Field(description="Weight version that the job goes back to.")
    lost: int = Field(description="Weight version that the job had reached.")
    prompts: int = Field(description="How many prompts are issued again.")


class JobStopping(EventData):
    """The job ends before its last step, by `schedule.stop_when`."""

    kind: Literal[EventKind.JOB_STOPPING] = EventKind.JOB_STOPPING
    step: int = Field(description="The last step.")
    metric: str
    cause: StopCause


class DataOpened(EventData):
    """The data files of a section of the job spec were opened, before the first prompt was issued."""

    kind: Literal[EventKind.DATA_OPENED] = EventKind.DATA_OPENED
    section: Literal["data", "evaluation"]
    rows: int
    description: list[str] = Field(description="What is taken for what, for each kind of file.")


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


class TrainerLost(EventData):
    """The trainer died or does not answer. The job waits for a trainer and continues."""

    kind: Literal[EventKind.TRAINER_LOST] = EventKind.TRAINER_LOST
    step: int = Field(description="Steps trained so far.")
    setbacks: int = Field(description="How many times in a row the trainer was lost at this step.")


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


class MemberOut(EventData):
    """A replica left or was lost; its leases go to other replicas."""

    kind: Literal[EventKind.MEMBER_OUT] = EventKind.MEMBER_OUT
    member: MemberId
    prompts: Sequence[PromptId] = Field(description="Prompts whose leases it held; the first 50.")


class MemberDied(EventData):
    """A member died while it worked for the job, which is charged with the death; or its next life told how it ended.
    The message has its last words."""

    kind: Literal[EventKind.MEMBER_DIED] = EventKind.MEMBER_DIED
    member: MemberId
    deaths: int | None = Field(
        None, description="Replicas: deaths in a row at its address, with no completed group in between."
    )


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


MEMBERS_TOLD = 32
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


class EvaluationDone(EventData):
    """The held-out prompts were scored."""

    kind: Literal[EventKind.EVALUATION_DONE] = EventKind.EVALUATION_DONE
    step: int
    version: int
    metrics: dict[str, Figure]


class CheckpointSaved(EventData):
    """A checkpoint is on the disk."""

    kind: Literal[EventKind.CHECKPOINT_SAVED] = EventKind.CHECKPOINT_SAVED
    step: int
    path: str
    bytes: int | None = Field(
        None, description="Not known if the trainer that wrote the checkpoint was lost before it answered."
    )
    seconds: Figure | None = Field(None, description="As `bytes`.")


class CheckpointBest(EventData):
    """Another checkpoint is the best one by `schedule.keep_best`."""

    kind: Literal[EventKind.CHECKPOINT_BEST] = EventKind.CHECKPOINT_BEST
    step: int
    path: str
    metric: str
    value: Figure


class CheckpointFailed(EventData):
    """A checkpoint could not be written; the one before stays the newest."""

    kind: Literal[EventKind.CHECKPOINT_FAILED] = EventKind.CHECKPOINT_FAILED
    step: int
    path: str


class TrackerFailed(EventData):
    """An experiment tracker failed or did not answer."""

    kind: Literal[EventKind.TRACKER_FAILED] = EventKind.TRACKER_FAILED
    tracker: str = ""


class ReportFailed(EventData):
    """The job's report could not be written."""

    kind: Literal[EventKind.REPORT_FAILED] = EventKind.REPORT_FAILED


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
    | TrainerOutOfMemory
    | MemberJoined
    | MemberConfigured
    | MemberFailed
    | MemberJoining
    | MemberOut
    | MemberDied
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
    | TrackerFailed
    | ReportFailed
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
        """Which payload this is; plain text where the coordinator is of another release."""
        return self.data.kind

    @model_validator(mode="before")
    @classmethod
    def _kind_in_data(cls, tree: Any) -> Any:
        """The kind is told beside the payload too; the event logs of release 0.1 have it only there."""
        if isinstance(tree, Mapping) and "kind" in tree and isinstance(tree.get("data", {}), Mapping):
            return {**tree, "data": {"kind": tree["kind"], **tree.get("data", {})}}
        return tree

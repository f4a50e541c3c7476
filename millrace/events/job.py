"""Payloads: the course of a job, its data, and what it leaves on the disk and in trackers."""

from typing import Literal

from pydantic import Field

from millrace.events.kind import EventData, EventKind
from millrace.rest import Figure, JobState, WaitingFor

StopCause = Literal["solved", "flat"]


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
    kept: int = Field(0, description="Complete groups that stay: later versions sampled none of their tokens.")
    discarded: int = Field(0, description="Complete groups with tokens of later versions, which are generated again.")


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


class CheckpointCopied(EventData):
    """A checkpoint is in the object store too, whole."""

    kind: Literal[EventKind.CHECKPOINT_COPIED] = EventKind.CHECKPOINT_COPIED
    step: int
    url: str
    bytes: int
    seconds: Figure


class CheckpointCopyFailed(EventData):
    """A checkpoint could not be copied to the object store; it is on the disk."""

    kind: Literal[EventKind.CHECKPOINT_COPY_FAILED] = EventKind.CHECKPOINT_COPY_FAILED
    step: int
    store: str


class TrackerFailed(EventData):
    """An experiment tracker failed or did not answer."""

    kind: Literal[EventKind.TRACKER_FAILED] = EventKind.TRACKER_FAILED
    tracker: str = ""


class ReportFailed(EventData):
    """The job's report could not be written."""

    kind: Literal[EventKind.REPORT_FAILED] = EventKind.REPORT_FAILED


class WebhookFailed(EventData):
    """A message of a webhook of the job was not delivered in any attempt."""

    kind: Literal[EventKind.WEBHOOK_FAILED] = EventKind.WEBHOOK_FAILED
    webhook: str = Field(description="Its field in the job spec.")
    message: str = Field(description="The kind of the message.")

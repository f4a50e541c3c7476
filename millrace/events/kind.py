"""The kinds of events, and the base of their payloads."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class EventKind(StrEnum):
    JOB_STATE = "job.state"
    JOB_WAITING = "job.waiting"
    JOB_REWOUND = "job.rewound"
    JOB_STOPPING = "job.stopping"
    DATA_OPENED = "data.opened"
    TRAINER_CONFIGURING = "trainer.configuring"
    TRAINER_CONFIGURED = "trainer.configured"
    TRAINER_LOST = "trainer.lost"
    TRAINER_LEFT = "trainer.left"
    TRAINER_OUT_OF_MEMORY = "trainer.out_of_memory"
    MEMBER_JOINED = "member.joined"
    MEMBER_CONFIGURED = "member.configured"
    MEMBER_FAILED = "member.failed"
    MEMBER_JOINING = "member.joining"
    MEMBER_HANDED_OVER = "member.handed_over"
    MEMBER_OUT = "member.out"
    MEMBER_DIED = "member.died"
    REPLICAS_SCALED = "replicas.scaled"
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
    CHECKPOINT_COPIED = "checkpoint.copied"
    CHECKPOINT_COPY_FAILED = "checkpoint.copy_failed"
    TRACKER_FAILED = "tracker.failed"
    REPORT_FAILED = "report.failed"
    WEBHOOK_FAILED = "webhook.failed"


class EventData(BaseModel):
    """Base of all payloads. Fields of another release are ignored."""

    model_config = ConfigDict(frozen=True)

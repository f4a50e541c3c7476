"""What a job waits for."""

from enum import StrEnum

from pydantic import BaseModel, Field


class WaitingFor(StrEnum):
    """What a job waits for."""

    EARLIER_JOB = "earlier_job"
    """A partition runs one job after another, and another job's turn comes first."""
    QUOTA = "quota"
    """Its user has as many active jobs as one user may have."""
    TRAINER = "trainer"
    """No trainer is connected."""
    TRAINER_LOADING = "trainer_loading"
    """The trainer loads the model or a checkpoint."""
    REPLICA = "replica"
    """No rollout replica is connected."""
    POOL = "pool"
    """A pool of the job has no replica that is ready to score."""
    REPLICAS_PREPARING = "replicas_preparing"
    """Replicas start their engines for the job, or receive the weights; none serves it yet."""
    REPLICAS_REFUSED = "replicas_refused"
    """Every connected replica refused the job as invalid."""
    REPLICAS_FAILED = "replicas_failed"
    """No connected replica could be made ready for the job; they are tried again."""
    JUDGE = "judge"
    """A judge does not answer a replica: answers wait for their scores, and generation goes on as far as it can."""
    RESUME = "resume"
    """Somebody paused the job."""


class WaitingView(BaseModel):
    reason: WaitingFor
    message: str = Field(description="For people: what the job waits for, with the replicas' words.")

"""What webhooks send, and how a test of them ended."""

from typing import Literal

from pydantic import BaseModel, Field

from millrace.rest import JobState

WebhookKind = Literal["succeeded", "failed", "cancelled", "stalled", "test"]


class WebhookJob(BaseModel):
    """The job that a message is about."""

    id: str
    name: str
    state: JobState
    step: int = Field(description="Steps trained.")
    steps: int = Field(description="Steps to train; 0 until the job has opened its data.")
    user: str
    failure: str | None = Field(description="Why the job failed.")


class WebhookMessage(BaseModel):
    """The body of a webhook's request. Fields may be added in later releases."""

    id: str = Field(description="The same in every attempt, also in the header `webhook-id`.")
    kind: WebhookKind
    time_s: float = Field(description="Unix time at which the message was made.")
    text: str = Field(description="For people, in one line. Chat services that take `text` show it.")
    job: WebhookJob | None = Field(description="null in a test without a job.")


class WebhookResult(BaseModel):
    """How the delivery of a test message ended."""

    field: str = Field(description="Which webhook: `webhooks.0` of the job, or `--webhook` of the coordinator.")
    delivered: bool
    reason: str = Field(description="Why it was not delivered, and what to do.")

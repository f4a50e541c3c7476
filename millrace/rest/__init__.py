"""The answers of the coordinator's REST API, for the coordinator and the client.

A `…View` is one object as people look at it. The event stream is declared in millrace/events.
"""

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, Field, computed_field

from millrace.drops import DropReason
from millrace.errors import Mistake
from millrace.rest.coverage import Coverage as Coverage
from millrace.rest.fleet import FleetView as FleetView
from millrace.rest.fleet import GpuView as GpuView
from millrace.rest.fleet import HostView as HostView
from millrace.rest.fleet import LogLineView as LogLineView
from millrace.rest.fleet import LogView as LogView
from millrace.rest.fleet import MemberKind as MemberKind
from millrace.rest.fleet import MemberState as MemberState
from millrace.rest.fleet import MemberView as MemberView
from millrace.rest.samples import Figure as Figure
from millrace.rest.samples import GroupPage as GroupPage
from millrace.rest.samples import GroupView as GroupView
from millrace.rest.samples import ImageView as ImageView
from millrace.rest.samples import SampleView as SampleView
from millrace.rest.samples import TokensView as TokensView
from millrace.rest.samples import TurnView as TurnView
from millrace.rest.waiting import WaitingFor as WaitingFor
from millrace.rest.waiting import WaitingView as WaitingView


class JobState(StrEnum):
    QUEUED = "queued"
    """Waits for a trainer, or for the jobs before it."""
    STARTING = "starting"
    """Trainer and replicas load the model; the first evaluation runs."""
    RUNNING = "running"
    PAUSED = "paused"
    """Stopped between two steps: nothing is issued, nothing is lost."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
"""A job in one of these states does nothing more, unless it is resumed."""


class JobRequest(StrEnum):
    """What was asked of a job and is not carried out yet."""

    PAUSE = "pause"
    CANCEL = "cancel"


IN_PROGRESS = {JobRequest.PAUSE: "pausing", JobRequest.CANCEL: "cancelling"}


class WarningCause(StrEnum):
    """What is likely wrong with the training of a job."""

    EQUAL_REWARDS = "equal_rewards"
    """All rewards of several steps are equal."""
    NO_SIGNAL = "no_signal"
    """Nearly all groups of several steps have equal rewards each, so their advantages are 0."""
    LOGPROB_MISMATCH = "logprob_mismatch"
    """Engine and trainer give tokens different log-probabilities."""
    RESPONSES_CUT = "responses_cut"
    """Nearly all responses are as long as they may be."""
    REWARD_FAILURES = "reward_failures"
    """The reward or the environment fails on a part of the prompts, which are dropped."""


class WarningView(BaseModel):
    cause: WarningCause
    step: int = Field(description="Step after which the job was warned.")
    message: str = Field(description="For people: the figure, what it means, and its likely cause.")
    over: bool = Field(False, description="Whether the trouble was gone in a later step.")


class JobSummary(BaseModel):
    """A job without its spec."""

    id: str
    name: str
    state: JobState
    pending: JobRequest | None = Field(None, description="What was asked of the job and is not carried out yet.")
    waiting: WaitingView | None = Field(None, description="What the job waits for; null while it works or has ended.")
    warnings: list[WarningView] = Field([], description="What is wrong with its training; the newest last.")
    step: int = Field(description="Steps trained.")
    steps: int = Field(
        0,
        description="Steps that the job will train; 0 for a job that only evaluates its model, and until it is known.",
    )
    steps_known: bool = Field(
        False,
        description="Whether `steps` is known: at once if the spec has `schedule.steps`, otherwise once the data "
        "is read.",
    )
    version: int = Field(description="Weight version that the trainer holds.")
    reward: float | None = Field(None, description="Mean reward of the last step's trajectories.")
    evaluation_before: float | None = Field(
        None, description="Held-out score at version 0: mean `acc`, or mean reward if the reward gives no `acc`."
    )
    evaluation_before_coverage: Coverage | None = Field(None, description="The prompts of `evaluation_before`.")
    evaluation_last: float | None = Field(
        None,
        description="Held-out score of the last evaluation after training began; null before there is one, and if none "
        "of its prompts was scored.",
    )
    evaluation_last_coverage: Coverage | None = Field(None, description="The prompts of `evaluation_last`.")
    evaluation_step: int | None = Field(None, description="Step after which `evaluation_last` was measured.")
    created_s: float = Field(description="Unix time of the submission.")
    queued_s: float = Field(0.0, description="Seconds that it has spent in the queue.")
    ran_s: float = Field(0.0, description="Seconds from its start to its end, or until now; pauses count.")
    finished_s: float | None = Field(None, description="Unix time of the end.")
    tags: list[str] = Field([], description="Words by which the job is found again, as they are now.")
    notes: str = Field("", description="What people noted about the job.")
    user: str = Field("", description="Who submitted it; empty if that was without a token.")
    partition: str = Field(
        "",
        description="The partition of the fleet in which it runs or ran; in the queue the one in which it has to run, "
        "empty for any.",
    )
    priority: int = Field(0, description="Of the jobs in the queue, those with a higher number start sooner.")
    checkpoint: str | None = Field(None, description="Folder of the last checkpoint.")
    report: str | None = Field(None, description="Path of the report that a finished job leaves in its output folder.")
    failure: str | None = Field(None, description="Why the job failed.")

    @computed_field(  # type: ignore[prop-decorator]  # mypy has no decorated properties (python/mypy#1362)
        description="`state` for people: pausing or cancelling while the job does what was asked of it."
    )
    @property
    def status(self) -> str:
        return IN_PROGRESS[self.pending] if self.pending is not None else self.state

    @property
    def steps_shown(self) -> str:
        """`steps` for people: ? as long as it is not known."""
        return str(self.steps) if self.steps_known or self.steps else "?"


class JobView(JobSummary):
    """A job."""

    whole_steps: str = Field(
        "",
        description="Why the trainer gets all groups of a step at once; empty if it gets them as they are completed "
        "(`trainer.streaming`), and before it has loaded the job.",
    )
    spec: dict[str, Any] = Field(description="The job spec with all defaults, as the release that took it wrote it.")
    advice: list[Mistake] = Field(
        [], description="In the answer to a submission: fields with a likely better value. The job runs as it is."
    )


class JobPage(BaseModel):
    """One page of the list of jobs, the newest first."""

    jobs: list[JobSummary]
    next: str | None = Field(description="`cursor` of the page that follows; null on the last page.")
    total: int = Field(description="Number of jobs on all pages.")


class DeletedView(BaseModel):
    """A job that is deleted."""

    id: str
    name: str
    checkpoints: list[str] = Field(description="Folders of checkpoints that were deleted with it.")


class LedgerView(BaseModel):
    """The state of every prompt of the job. `issued` is the sum of the other counts."""

    issued: int = Field(description="Prompts issued since the job began.")
    queued: int = Field(description="In the queue, leased by no replica.")
    leased: int
    generated: int = Field(description="Complete groups that wait to be trained.")
    trained: int
    dropped: int
    reasons: dict[DropReason, int] = Field(description="Dropped prompts by reason.")


class StepMetrics(BaseModel):
    """One row of a job's step metrics: every metric that one step has. docs/metrics.md declares them."""

    step: int
    time_s: float = Field(description="Unix time.")
    values: dict[str, Figure]


class SpecView(BaseModel):
    """A job spec, and the part of it that differs from the defaults."""

    spec: dict[str, Any] = Field(description="The job spec with all defaults.")
    given: dict[str, Any] = Field(description="Fields whose values are not the defaults, nested as in the spec.")


class ValidationView(BaseModel):
    """Whether a job spec can be submitted."""

    valid: bool
    spec: SpecView | None = Field(description="The spec as it would be stored; null if it is not valid.")
    mistakes: list[Mistake] = Field(description="Everything that is wrong in it.")
    detail: str = Field(description="For people: what is wrong; empty if it is valid.")
    fix: str = Field(description="What to do next; empty if `detail` or `mistakes` say it.")
    advice: list[Mistake] = Field([], description="Fields of a valid spec with a likely better value.")


class MetricView(BaseModel):
    """A step metric that a job has."""

    key: str
    section: str = Field(description="Heading of its section in docs/metrics.md.")
    unit: str = Field(description="Empty if this release does not declare the metric.")
    meaning: str = Field(description="One sentence in Markdown.")


class BandView(BaseModel):
    """One metric at each point of a curve; null if no step of the point has it."""

    mean: list[Figure | None]
    least: list[Figure | None] = Field(description="Least value of the point's steps; empty if each has one step.")
    greatest: list[Figure | None] = Field(description="As `least`.")


class SeriesView(BaseModel):
    """Curves of step metrics. A point stands for one step, or for several steps in a row."""

    steps: list[int] = Field(description="The last step of each point.")
    time_s: list[float] = Field(description="Unix time of that step.")
    tokens: list[float] = Field(description="Prompt and response tokens that the point's steps were trained on.")
    metrics: dict[str, BandView]


class HistogramView(BaseModel):
    """How one quantity was distributed in some steps of a job."""

    key: str
    unit: str
    meaning: str = Field(description="One sentence in Markdown.")
    fixed: bool = Field(description="Whether the edges are the same in every step; then the bins differ in width.")
    whole_numbers: bool = Field(description="Whether the values are whole numbers.")
    steps: list[int]
    edges: list[list[float]] = Field(
        description="Edges of each step's bins, ascending, one more than bins. A bin has its lower edge, the last one"
        " both of its edges."
    )
    counts: list[list[int]] = Field(description="Values in each bin of each step.")


class ProblemType(StrEnum):
    """What went wrong, as the URI of a problem document."""

    INVALID_JOB = "urn:millrace:problem:invalid-job"
    """The job spec, or a change of one, has mistakes."""
    INVALID_REQUEST = "urn:millrace:problem:invalid-request"
    """A parameter of the path, of the query or of a header has a wrong value."""
    INVALID_STATE = "urn:millrace:problem:invalid-state"
    """The state of the job or member does not allow the request."""
    FENCED = "urn:millrace:problem:fenced"
    """Something newer has replaced what the request names."""
    NOT_FOUND = "urn:millrace:problem:not-found"
    """There is no such job, member or path."""
    METHOD_NOT_ALLOWED = "urn:millrace:problem:method-not-allowed"
    """The path does not take this method; the header `Allow` names those that it takes."""
    UNAUTHORIZED = "urn:millrace:problem:unauthorized"
    """The token is missing or wrong."""
    FORBIDDEN = "urn:millrace:problem:forbidden"
    """The request comes from a web page of another site, or the role of its token does not allow it."""
    REQUEST_TIMEOUT = "urn:millrace:problem:request-timeout"
    """The body was not sent in time."""
    CONTENT_TOO_LARGE = "urn:millrace:problem:content-too-large"
    """The body is too large for a job spec."""
    UNSUPPORTED_MEDIA_TYPE = "urn:millrace:problem:unsupported-media-type"
    """The body is neither JSON nor YAML."""
    TOO_MANY_REQUESTS = "urn:millrace:problem:too-many-requests"
    """Too many requests are in progress; repeat it after `Retry-After` seconds."""
    UNAVAILABLE = "urn:millrace:problem:unavailable"
    """Redis, or another service that is needed, does not answer; repeat it later."""
    INTERNAL = "urn:millrace:problem:internal"
    """The coordinator failed, because of a bug or of an error that has no type of its own."""
    OTHER = "about:blank"
    """What the status says, and no more."""


class Problem(BaseModel):
    """An error, as RFC 9457 describes it, with what to do next."""

    type: str = Field(
        description=f"URI that says what went wrong: {', '.join(f'`{each}`' for each in ProblemType)}.",
        json_schema_extra={"format": "uri"},
    )
    title: str
    status: int
    detail: str
    fix: str = Field(description="What to do next; empty if every line of `detail` says it.")
    mistakes: list[Mistake] = Field(default=[], description="Everything that is wrong in the request.")

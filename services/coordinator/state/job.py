"""A job's states and their transitions as data, and its record."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, Self

from millrace.errors import InvalidState, NotFound
from millrace.ids import JobId, MemberId, Version
from millrace.rest import JobRequest, JobState, JobSummary, JobView, WaitingView, WarningView
from millrace.rest.coverage import Coverage
from millrace.rest.fleet import DEFAULT_PARTITION
from millrace.spec.job import JobSpec

TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.FAILED, JobState.CANCELLED}),
    JobState.STARTING: frozenset({JobState.RUNNING, JobState.FAILED, JobState.CANCELLED}),
    JobState.RUNNING: frozenset(
        {JobState.PAUSED, JobState.QUEUED, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}
    ),  # to the queue: it gave way to a job of a higher priority
    JobState.PAUSED: frozenset({JobState.RUNNING, JobState.FAILED, JobState.CANCELLED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset({JobState.QUEUED}),
    JobState.CANCELLED: frozenset({JobState.QUEUED}),
}
ENDED = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
ACTIVE = frozenset({JobState.STARTING, JobState.RUNNING, JobState.PAUSED})
"""A job in one of these states has the trainer."""


def lua_ended() -> str:
    """`ENDED` as a Lua table: ENDED.failed = true."""
    return "local ENDED = {" + ", ".join(f"{state} = true" for state in sorted(ENDED)) + "}\n"


class Wanted(StrEnum):
    """A request to a job that its loop has not carried out yet."""

    NOTHING = ""
    PAUSE = "pause"
    CANCEL = "cancel"


def before(state: JobState) -> list[JobState]:
    """The states from which `state` can be reached."""
    return [s for s, following in TRANSITIONS.items() if state in following]


def placement(spec: JobSpec) -> dict[str, Any]:
    """The fields of a record by which a job gets its partition and its turn, from its spec."""
    schedule, pools = spec.schedule, ",".join(pool.name for pool in spec.pools)
    return {
        "wanted_partition": schedule.partition or "",
        "priority": schedule.priority,
        "share": schedule.share,
        "preempt": int(schedule.preempt),
        "pools": pools,
    }


def steps_of(spec: JobSpec) -> dict[str, Any]:
    """The field `steps` of a record as far as the spec says it."""
    return {} if spec.schedule.steps is None else {"steps": spec.schedule.steps}


def no_such_job(job_id: str) -> NotFound:
    return NotFound(f"there is no job {job_id}.", "list the jobs with `millrace jobs` or GET /v1/jobs.")


def refusal(job_id: str, state: JobState, asked: str, wanted: Wanted = Wanted.NOTHING) -> InvalidState:
    """The error for a job that cannot be `asked` (paused, cancelled, ...) in `state`, or while `wanted` is pending."""
    if wanted is Wanted.CANCEL and state not in ENDED:
        what = f"{job_id} is {state} and about to be cancelled; it cannot be {asked}."
        return InvalidState(what, f"wait until it has ended; `millrace resume {job_id}` continues it then.")
    fix = f"wait until {job_id} can be {asked}."
    if state is JobState.SUCCEEDED:
        fix = "it has trained all of its steps; submit a new job."
    elif state in ENDED:
        fix = f"it has ended; continue it with `millrace resume {job_id}`, or submit a new job."
    return InvalidState(f"{job_id} is {state} and cannot be {asked}.", fix)


_READ: Mapping[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    Version: int,
    JobState: JobState,
    Wanted: Wanted,
    float | None: float,
    int | None: int,
}
"""How a field of the store is read, by its type in the record. All others are text."""


@dataclass(frozen=True)
class JobRecord:
    """A job as the store holds it."""

    id: JobId
    name: str
    state: JobState
    created_s: float
    spec_json: str = ""
    """Empty if the job was read for a list."""
    step: int = 0
    """Steps trained, according to the ledger."""
    steps: int | None = None
    """Steps to train; None: the spec does not say it, and the data is not read yet."""
    version: Version = Version(0)  # noqa: RUF009
    """The version that the trainer holds according to the ledger."""
    lineage: int = 0
    """Grows with every start, and whenever the trainer goes back. Weights of another lineage are not valid."""
    configuration: str = ""
    """Names the last loading of the job by a trainer in the seat. A trainer that holds it from another loading loads it
    again, except one that stood by during this one: see `standby_configuration`."""
    cursor: int = 0
    """Prompts drawn from the data, over all passes."""
    rows: int = 0
    data_fingerprint: str = ""
    """`PromptSource.fingerprint` of when the job began; empty before, and if the spec alone says what the data is."""
    last_step: int = 0
    """The step after which the job stops early; 0: after those of its schedule."""
    reward: float | None = None
    evaluation_before: float | None = None
    evaluation_before_scored: int = 0
    evaluation_before_asked: int = 0
    """Held-out prompts; 0: there was no evaluation yet."""
    evaluation_last: float | None = None
    """None until an evaluation after a step; of a job without steps that of its model."""
    evaluation_last_scored: int = 0
    evaluation_last_asked: int = 0
    evaluation_step: int = -1
    queued_s: float = 0.0
    """Seconds in the queue up to `since_s`."""
    ran_s: float = 0.0
    """Seconds between starts and ends up to `since_s`."""
    since_s: float = 0.0
    """Unix time at which it was last queued or started, or ended; 0: it has been in the queue since `created_s`."""
    finished_s: float | None = None
    checkpoint: str | None = None
    checkpoint_step: int = -1
    report: str | None = None
    failure: str | None = None
    token_budget: int = 0
    """Tokens in a micro-batch since the trainer ran out of memory; 0: those of the spec."""
    whole_steps: str = ""
    """Why the trainer gets all groups of a step at once; empty where it does not, and before it has loaded the job."""
    warnings_json: str = "[]"
    """A list of WarningView."""
    tags_json: str = "[]"
    notes: str = ""
    user: str = ""
    """Who submitted it; empty if that was without a token."""
    wanted: Wanted = Wanted.NOTHING
    partition: str = ""
    """The partition in which it started last; empty: it has not started, or there was only the default one then."""
    wanted_partition: str = ""
    """The partition in which it has to run; empty: any whose members can run it."""
    priority: int = 0
    preempt: int = 0
    """1: while it waits for its turn, jobs of a lower priority give way to it."""
    share: float = 1.0
    """The job's share of the replicas that running jobs share, in relation to the shares of the others."""
    started_step: int = 0
    """Steps that were trained when it started last."""
    gave_way: str = ""
    """Why it is in the queue again, if it gave way to another job; empty since it has started again."""
    pools: str = ""
    """Names of the pools that it needs besides `rollout`, with commas between them."""
    folder: str = ""
    """The output folder without symbolic links, as it was at the submission. Jobs are indexed by it."""

    @cached_property
    def spec(self) -> JobSpec:
        return JobSpec.model_validate_json(self.spec_json)

    @cached_property
    def spec_digest(self) -> str:
        return hashlib.sha256(self.spec_json.encode()).hexdigest()

    def standby_configuration(self, member: MemberId) -> str:
        """Names the loading of the job by a trainer that stands by. It is another one as soon as a trainer in the seat
        has loaded the job, so that no trainer goes on from a state that the ledger left."""
        return hashlib.sha256(f"{self.configuration} {member}".encode()).hexdigest()[:16]

    @cached_property
    def spec_for_members(self) -> str:
        """The spec as trainer and replicas get it: without the fields that have their defaults."""
        schedule = self.spec.schedule.model_copy(
            update={"partition": None, "priority": 0, "preempt": False, "share": 1.0}
        )  # of no use to a member
        return self.spec.model_copy(update={"schedule": schedule}).without_defaults()

    @property
    def place(self) -> str:
        """The partition of a job that has begun."""
        return self.partition or DEFAULT_PARTITION

    @property
    def _shown_partition(self) -> str:
        """The partition that people see: before a start the one that it has to run in."""
        return self.wanted_partition if self.state is JobState.QUEUED else self.partition

    @property
    def pool_names(self) -> list[str]:
        return self.pools.split(",") if self.pools else []

    def clock(self, now_s: float) -> dict[str, Any]:
        """The fields `queued_s`, `ran_s` and `since_s` at the Unix time `now_s`, to be stored when the job moves to
        another phase: queued, running, ended."""
        passed = max(0.0, now_s - (self.since_s or self.created_s))
        queued, ran = (passed if self.state is JobState.QUEUED else 0.0), (passed if self.state in ACTIVE else 0.0)
        return {"queued_s": self.queued_s + queued, "ran_s": self.ran_s + ran, "since_s": now_s}

    @property
    def warnings(self) -> list[WarningView]:
        """What the job was warned of, oldest first."""
        return [WarningView.model_validate(tree) for tree in json.loads(self.warnings_json)]

    def has(self, tag: str | None) -> bool:
        """Whether the job has the tag; None: any job does."""
        return tag is None or tag in json.loads(self.tags_json)

    def named_for(self, other: "JobRecord") -> str:
        """This job as other users see it."""
        return f"{self.id} ({self.name})" if self.user == other.user else "a job of another user"

    @property
    def output(self) -> str:
        """The output folder. It is read without validating the spec, which may be of another release."""
        return str(json.loads(self.spec_json)["output"])

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> Self:
        kinds = {name: _READ.get(field.type, str) for name, field in cls.__dataclass_fields__.items()}
        return cls(**{name: read(fields[name]) for name, read in kinds.items() if fields.get(name)})

    def summary(self, waiting: WaitingView | None) -> JobSummary:
        """The job in a list. `waiting`: what it waits for."""
        clock = self.clock(time.time())
        return JobSummary(
            id=self.id,
            name=self.name,
            state=self.state,
            pending=JobRequest(self.wanted) if self.wanted and self.state not in ENDED else None,
            waiting=waiting,
            warnings=[warning for warning in self.warnings if not warning.over],
            step=self.step,
            steps=self.steps or 0,
            steps_known=self.steps is not None,
            version=self.version,
            reward=self.reward,
            evaluation_before=self.evaluation_before,
            evaluation_before_coverage=Coverage.of(self.evaluation_before_scored, self.evaluation_before_asked),
            evaluation_last=self.evaluation_last,
            evaluation_last_coverage=Coverage.of(self.evaluation_last_scored, self.evaluation_last_asked),
            evaluation_step=self.evaluation_step if self.evaluation_step >= 0 else None,
            created_s=self.created_s,
            queued_s=clock["queued_s"],
            ran_s=clock["ran_s"],
            finished_s=self.finished_s,
            tags=json.loads(self.tags_json),
            notes=self.notes,
            user=self.user,
            partition=self._shown_partition,
            priority=self.priority,
            checkpoint=self.checkpoint,
            report=self.report,
            failure=self.failure,
        )

    def view(self, waiting: WaitingView | None) -> JobView:
        """The job as REST shows it. `waiting`: what it waits for."""
        summary = dict(self.summary(waiting))
        return JobView(**summary, whole_steps=self.whole_steps, spec=json.loads(self.spec_json))

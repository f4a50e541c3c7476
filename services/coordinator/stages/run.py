"""One job while it runs: its record, its data, and the coordinator's components that its stages use."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Self

from millrace.contracts.v1 import trainer_pb2
from millrace.data import Order, PromptSource
from millrace.errors import InvalidState, Unavailable
from millrace.events import Payload
from millrace.ids import MemberId, Purpose, Version
from millrace.rest import JobState
from millrace.spec.job import JobSpec
from millrace.spec.pool import ROLLOUT
from millrace.telemetry.spans.context import TraceContext
from millrace.trackers import Tracker
from services.coordinator.fleet.fleet import Fleet
from services.coordinator.fleet.partition import Partition, Trainer
from services.coordinator.observe.events import Events
from services.coordinator.observe.prometheus import PrometheusMetrics
from services.coordinator.observe.span_store import SpanStore
from services.coordinator.observe.step_metrics import Lengths, step_row
from services.coordinator.publication.joining import Joining
from services.coordinator.publication.publisher import Publisher
from services.coordinator.state.bell import Bell, waited
from services.coordinator.state.faults import Deaths
from services.coordinator.state.job import JobRecord, Wanted
from services.coordinator.state.member import Weights
from services.coordinator.state.waiting import Turn
from services.coordinator.store import Store
from services.coordinator.work.deaths import DeathWatch
from services.coordinator.work.queue import Queue, Queues
from services.coordinator.work.terms import LeaseTerms, RunningJob

LOOK_EVERY_S = 1.0


class Cancelled(Exception):
    """The job was cancelled."""


class GaveWay(Exception):
    """The job goes back to the queue, for another one. Its checkpoint is that of its last step."""

    def __init__(self, other: JobRecord) -> None:
        super().__init__(other.id)
        self.other = other


@dataclass(frozen=True, kw_only=True)
class Shared:
    """The coordinator's components of which all partitions use the same."""

    store: Store
    whole_fleet: Fleet
    queues: Queues
    events: Events
    prometheus: PrometheusMetrics
    spans: SpanStore
    control: Bell
    """Rings at every request to a job: submit, cancel, pause, resume."""
    work_address: str
    """host:port of the Work service, as the trainer's ranks reach it."""


@dataclass(frozen=True, kw_only=True)
class Components(Shared):
    """What one partition runs its jobs with. A job's loop uses these and changes nothing of another partition."""

    fleet: Partition
    trainer: Trainer
    queue: Queue
    publisher: Publisher
    turn: Turn

    @classmethod
    def of(cls, shared: Shared, name: str) -> Self:
        """The parts of a new partition."""
        members, turn = Partition(shared.whole_fleet, name), Turn()
        DeathWatch(shared.store, members, turn, shared.events)  # before the queue, whose bell has the loop look at them
        trainer, queue = Trainer(members), Queue(shared.store, members, shared.events, shared.prometheus)
        shared.queues.add(name, queue)
        publisher = Publisher(shared.store, members, trainer, shared.events, shared.prometheus)
        return cls(**vars(shared), fleet=members, trainer=trainer, queue=queue, publisher=publisher, turn=turn)


@dataclass
class TimeWithoutReplicas:
    """How long no replica has served the job. Time in which a replica is being configured does not count."""

    seconds: float = 0.0
    looked_at: float = field(default_factory=time.monotonic)

    def update(self, serving: bool, configuring: bool) -> float:
        """The time so far, in seconds."""
        now = time.monotonic()
        passed, self.looked_at = min(now - self.looked_at, 2 * LOOK_EVERY_S), now  # a paused job does not call this
        self.seconds = 0.0 if serving else self.seconds + (0.0 if configuring else passed)
        return self.seconds


@dataclass(frozen=True)
class Evaluating:
    """An evaluation in progress."""

    lineage: int
    version: Version
    """The version that all of its answers are of."""
    step: int
    """The step after which it is due, whose row gets its metrics."""
    began_s: float
    """Unix time."""
    instead_of: int = -1
    """The version whose evaluation was lost, so that this one is made in its place; -1: none."""


EVALUATING = "evaluating"
"""Names the note that says which evaluation is in progress."""


@dataclass
class Standby:
    """What the job's loop and the task that serves the trainers that stand by know of each other."""

    held: dict[MemberId, Version] = field(default_factory=dict)
    """The version that each of them holds; those that do not hold the job are left out."""
    begun: str = ""
    """The folder with the state that the trainer writes for them; empty if it writes none."""
    copies: dict[MemberId, trainer_pb2.ReceiveStateRequest] = field(default_factory=dict)
    """The copies that the trainer sends, by who receives them."""
    by_disk_until: dict[MemberId, Version] = field(default_factory=dict)
    """The trainers to which a copy could not be sent, and the version from which on that is tried again."""


class Run:
    """A job that runs, from its start or resume to its end. Each stage of the loop gets it."""

    def __init__(
        self, job: JobRecord, components: Components, source: PromptSource, evaluation_source: PromptSource | None
    ) -> None:
        self.job = job
        self.spec: JobSpec = job.spec
        self.components = components
        self.source = source
        self.evaluation_source = evaluation_source
        self.prompts = components.store.prompts(job.id, Purpose.TRAIN)
        self.evaluation = components.store.prompts(job.id, Purpose.EVALUATION)
        self.records = components.store.records(job.id)
        self.joining = Joining(
            job, components.store, components.fleet, components.trainer, components.publisher, components.events
        )
        self.evaluating: Evaluating | None = None
        """The evaluation in progress."""
        self.saving: asyncio.Task[float | None] | None = None
        """Waits for the checkpoint that the trainer is writing."""
        self.copying: asyncio.Task[None] | None = None
        """Copies the newest checkpoint to the object store, after the one before."""
        self.standby = Standby()
        self.standing_by: asyncio.Task[None] | None = None
        """Keeps the trainers that stand by ready."""
        self.trackers: list[Tracker] | None = None
        """Opened when the first row is sent."""
        self.microbatches_at_once = 0
        """Micro-batches that keep all ranks of the trainer busy; 0: it takes no step in parts."""
        self.lengths = Lengths()
        self.preempted_by: Callable[[], Awaitable[JobRecord | None]] | None = None
        """Finds the queued job for which this one gives way now; None: it never does."""
        self._terms = LeaseTerms.of(self.spec)
        self._without_replicas = {name: TimeWithoutReplicas() for name in (ROLLOUT, *(p.name for p in self.spec.pools))}
        self._order: tuple[int, Order] | None = None
        self.step_began: dict[int, float] = {}
        """Unix time at which the step in progress began."""
        self.groups_of_step: list[TraceContext] = []
        """Roots of the traces of the groups that the step in progress has used."""

    def order(self, turn: int) -> Order:
        """The order of the rows in pass `turn`. Computed once for each pass."""
        if self._order is None or self._order[0] != turn:
            data = self.spec.data
            self._order = (turn, self.source.order(turn, data.seed, data.shuffle))
        return self._order[1]

    @property
    def steps(self) -> int:
        """Number of steps to train."""
        if self.job.last_step:
            return self.job.last_step
        schedule = self.spec.schedule
        if schedule.steps is not None:
            return schedule.steps
        return max(1, schedule.passes * len(self.source) // schedule.prompts_per_step)

    @property
    def done(self) -> bool:
        """Whether all steps are trained."""
        return self.job.step >= self.steps

    @property
    def weights(self) -> Weights:
        """The weights that the trainer holds, according to the ledger."""
        return Weights(self.job.id, self.job.lineage, self.job.version)

    async def refresh(self) -> None:
        """Reads the job's record again; leases and joining use its version from now on."""
        self.job = await self.components.store.jobs.get(self.job.id)
        self.joining.job = self.job
        evaluated = self.evaluating.version if self.evaluating else None
        self.components.queue.running_job = RunningJob(
            self.weights, self.spec.schedule.max_staleness, self._terms, evaluated
        )
        self.components.fleet.bell.ring()

    async def tell(self, data: Payload, message: str) -> None:
        """Adds an event to the job's log."""
        await self.components.events.add(self.job.id, data, message)

    async def add_to_row(self, values: dict[str, float], step: int | None = None) -> None:
        """Adds metrics to the row of a step; None: the current one."""
        step = self.job.step if step is None else step
        await self.records.set_rows(step_row(step, values, earlier=await self.records.row(step)))

    async def forget_evaluation(self) -> None:
        """Gives up the evaluation in progress, if there is one."""
        self.evaluating = None
        await self.records.set_note(EVALUATING, None)
        await self.evaluation.forget()

    async def heed(self, may_pause: bool = True) -> None:
        """Carries out a pending request: raises Cancelled, or waits as long as the job is paused. Without `may_pause` a
        pause that is asked for begins at a later call.

        Raises Superseded if another coordinator has taken over.
        """
        await self.components.store.leadership.still_ours()
        state, wanted = await self.components.store.jobs.wanted(self.job.id)
        if wanted is Wanted.PAUSE and state is JobState.RUNNING and may_pause:
            message = f"paused after step {self.job.step}"
            with contextlib.suppress(InvalidState):  # meanwhile the request was withdrawn, or the job cancelled
                await self.components.events.move(
                    self.job.id, JobState.PAUSED, message, pending=Wanted.PAUSE, wanted=Wanted.NOTHING
                )
            state, wanted = await self.components.store.jobs.wanted(self.job.id)
        while state is JobState.PAUSED and wanted is not Wanted.CANCEL:
            self.components.trainer.check_stays()
            await waited(self.components.control.next(), LOOK_EVERY_S)
            state, wanted = await self.components.store.jobs.wanted(self.job.id)
        if wanted is Wanted.CANCEL:
            raise Cancelled(f"{self.job.id} was cancelled after step {self.job.step}")

    def close(self) -> None:
        """Closes the trackers."""
        for tracker in self.trackers or []:
            tracker.close()

    async def check_fleet(self, trainer_needed: bool) -> None:
        """Called while groups are waited for. Raises TrainerLost if another trainer has taken over, or if it is gone
        and `trainer_needed`: replicas may be waiting for its weights. Raises Unavailable if no replica of a pool has
        served the job for too long, or all of them died too often while they worked for it."""
        self.components.trainer.check(trainer_needed)
        deaths = await self.components.store.deaths(self.job.id).all()
        for pool, without in self._without_replicas.items():
            self._check_deaths(pool, deaths.of_pool(pool))
            self._check_pool(pool, without)

    def _check_deaths(self, pool: str, deaths: Deaths) -> None:
        """Raises Unavailable if the budget of deaths is spent at every place of the pool."""
        if number := deaths.spent([member.place for member in self.components.fleet.pool(pool)]):
            which = "" if pool == ROLLOUT else f" of the pool {pool}"
            what = (
                f"a replica{which} failed {number} times in a row at the work of this job (it died, or could not be "
                f"made ready), and no group was completed in between. The last one: {deaths.words}"
            )
            raise Unavailable(what, f"remove the cause, then resume the job; `millrace events {self.job.id}` has more.")

    def _check_pool(self, pool: str, without: TimeWithoutReplicas) -> None:
        """Raises Unavailable if no replica of the pool has served the job for too long."""
        job, replicas = self.job.id, self.components.fleet.pool(pool)
        if pool == ROLLOUT:
            serving = any(m.weights is not None and m.weights.job_id == job for m in replicas)
        else:
            serving = any(m.ready_for(job) for m in replicas)
        limit_s = self.spec.deadlines.no_replica_s
        if without.update(serving, any(m.configuring for m in replicas)) > limit_s:
            which, start = ("", "") if pool == ROLLOUT else (f" of the pool {pool}", f" with --pool {pool}")
            what = f"no replica{which} has served the job for {limit_s:g} s; {len(replicas)} are in the fleet."
            failures = (m.failed_at(job, self.job.spec_digest) for m in replicas)
            for error, number in Counter(str(failed.error) for failed in failures if failed is not None).items():
                what += f" {number} could not be made ready: {error}"
            raise Unavailable(what, f"start replicas{start}, see why they fail, or raise deadlines.no_replica_s.")

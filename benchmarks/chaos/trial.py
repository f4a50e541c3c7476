"""One seed: a stack, a job, its faults, and what was found."""

import contextlib
import math
import os
import secrets
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos.faults import LATEST_S, Act, Fault, Target, draw, staleness
from benchmarks.chaos.files import checkpoint_is_whole, nothing_forbidden
from benchmarks.chaos.invariants import ALWAYS, ENDED, QUIET, Terms, violations
from benchmarks.chaos.job import job
from benchmarks.chaos.observation import Observation, Observer
from benchmarks.chaos.processes import carrying, find
from benchmarks.chaos.watch import Watch
from millrace.client import Client
from millrace.errors import InvalidJob, MillraceError
from millrace.ids import JobId
from millrace.local.options import StackOptions
from millrace.local.stack import Stack
from millrace.rest import JobState
from tests.ports import held_port

LOOK_S = 0.1
PUBLICATION_LOOK_S = 0.001
PUBLICATION_S = 0.04
"""About how long a publication of the job lasts."""
MARK = "MILLRACE_CHAOS"
"""Environment variable by which every process of a trial is found, also one that nobody waits for any more."""
NUMBERS = {Act.KILL: signal.SIGKILL, Act.TERM: signal.SIGTERM, Act.STOP: signal.SIGSTOP}


@dataclass(frozen=True)
class Shape:
    """What a trial runs."""

    faults: int = 10
    engine: str = "transformers"
    replicas: int = 2
    ranks: int = 2
    patience_s: float = 180.0
    """A fault after which no step is completed for so long is a failure."""
    only: tuple[Target, ...] = tuple(Target)
    """The kinds of processes to strike, of those that there are."""
    carried: int = 0
    """`schedule.carried_prompts` of the jobs. Above 0, jobs are never strictly on-policy."""
    publishing: bool = False
    """Strike within a publication, instead of at any time."""

    @property
    def targets(self) -> list[Target]:
        absent = set() if "vllm" in self.engine else {Target.ENGINE}
        return [target for target in self.only if target not in absent]


@dataclass
class Struck:
    """A fault that happened."""

    fault: Fault
    at_s: float
    """Seconds since the job's first step."""
    pid: int
    recovery_s: float | None = None
    """Seconds until a step that began after the fault was completed; None where none was."""
    milestones: dict[str, float] = field(default_factory=dict)
    """Event kind → seconds until the first such event, of those on the way to the next step."""
    found: list[str] = field(default_factory=list)
    """What contradicted a line of "What always holds" between this fault and the next."""


@dataclass
class Outcome:
    """What a trial came to."""

    seed: int
    max_staleness: int
    folder: Path
    struck: list[Struck] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    """Contradictions before the first fault and after the last."""
    steps: int = 0
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        return not self.found and not any(one.found or one.recovery_s is None for one in self.struck)


def trial(seed: int, folder: Path, shape: Shape, tell: Callable[[Struck], None] = lambda _: None) -> Outcome:
    """Runs a seed's faults in `folder` and ends everything that it started. `tell` gets each fault once it is over."""
    began, mark, token = time.monotonic(), secrets.token_hex(8), secrets.token_hex(16)
    outcome = Outcome(seed, max(staleness(seed), int(shape.carried > 0)), folder)
    folder.mkdir(parents=True, exist_ok=True)
    spec = job(folder, outcome.max_staleness, shape.carried)
    with _environment({MARK: mark, "MILLRACE_TOKEN": token}), _nothing_left(mark, outcome.found):
        with _stack(folder, shape) as stack, stack.client(patience_s=60.0) as client:
            _Trial(stack, client, shape, outcome, tell).run(spec)
        outcome.found += nothing_forbidden([folder], [], token)
    outcome.seconds = time.monotonic() - began
    return outcome


def attempted(seed: int, folder: Path, shape: Shape, tell: Callable[[Struck], None] = lambda struck: None) -> Outcome:
    """The outcome of `trial`; an exception becomes a finding, because the other seeds are still of use."""
    try:
        return trial(seed, folder, shape, tell)
    except Exception as error:
        traceback.print_exc()
        return Outcome(seed, -1, folder, found=[f"{type(error).__name__}: {error}"])


@contextlib.contextmanager
def _stack(folder: Path, shape: Shape) -> Iterator[Stack]:
    with held_port() as http, held_port() as grpc:
        options = StackOptions(
            str(folder / "state"),
            replicas=shape.replicas,
            ranks=shape.ranks,
            engine=shape.engine,
            http_port=http,
            grpc_port=grpc,
            environment={"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
        )
        with Stack(options) as stack:
            yield stack


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """The variables for this process and those that it starts. The token is in no command line and no file."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def _nothing_left(mark: str, found: list[str]) -> Iterator[None]:
    """Kills what the code inside has left, and adds it to `found`."""
    try:
        yield
    finally:
        for process in carrying(MARK, mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(f"4 nothing waits for ever: {process.pid} ({' '.join(process.cmdline())[:80]}) is left")
                process.kill()


class _Trial:
    """A seed's faults and the stack that they happen to."""

    def __init__(
        self, stack: Stack, client: Client, shape: Shape, outcome: Outcome, tell: Callable[[Struck], None]
    ) -> None:
        self._stack, self._client, self._shape, self._outcome, self._tell = stack, client, shape, outcome, tell

    def run(self, spec: Mapping[str, Any]) -> None:
        job_id = JobId(self._client.submit(spec).id)
        with contextlib.closing(Observer(Path(self._stack.options.state) / "coordinator")) as observer:
            terms = Terms(self._outcome.max_staleness)
            self._watch = Watch(observer, job_id, terms, self._shape.patience_s)
            if self._watch.recovery(self._outcome.found) is None:
                self._outcome.found.append(f"the job took no step within {self._shape.patience_s:g} s")
                return
            self._began = time.monotonic()
            for fault in draw(self._outcome.seed, self._shape.faults, self._shape.targets):
                struck = self._strike(fault)
                self._tell(struck)
                if struck.recovery_s is None:
                    return
            self._refused({**spec, "algorithm": {"advantage": {"name": "no such thing"}}})
            self._end(observer, job_id)

    def _strike(self, fault: Fault) -> Struck:
        """One fault: from the wait before it until a new step is completed and nothing is stopped any more."""
        victim = self._victim_in_time(fault)
        struck = Struck(fault, time.monotonic() - self._began, victim.pid)
        self._outcome.struck.append(struck)
        if fault.target in MAY_COST_A_GROUP:
            terms = self._watch.terms
            self._watch.terms = replace(terms, lost_groups=terms.lost_groups + 1)
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(NUMBERS[fault.act])
        struck_s = time.time()
        stopped = victim if fault.act is Act.STOP else None
        struck.recovery_s = self._watch.recovery(struck.found, stopped, fault.stopped_s)
        milestones = self._watch.observer.milestones(self._watch.job_id, struck_s)
        struck.milestones = {k: s for k, s in milestones.items() if s <= (struck.recovery_s or math.inf)}
        return struck

    def _victim_in_time(self, fault: Fault) -> psutil.Process:
        """The process to strike, at the instant at which to do so."""
        if not self._shape.publishing:
            time.sleep(fault.after_s)
            return self._victim(fault)
        victim = self._victim(fault)  # before the publication, which is shorter than the search
        deadline = time.monotonic() + self._shape.patience_s
        while not self._watch.observer.publishes(self._watch.job_id):
            if time.monotonic() > deadline:
                raise MillraceError(f"no publication began within {self._shape.patience_s:g} s.")
            time.sleep(PUBLICATION_LOOK_S)
        time.sleep(fault.after_s / LATEST_S * PUBLICATION_S)
        return victim

    def _victim(self, fault: Fault) -> psutil.Process:
        """Waits for one where the last fault took all of them."""
        deadline = time.monotonic() + self._shape.patience_s
        while not (found := find(self._stack, fault.target)):
            if time.monotonic() > deadline:
                raise MillraceError(f"there is no {fault.target} within {self._shape.patience_s:g} s.")
            time.sleep(LOOK_S)
        return found[int(fault.which * len(found))]

    def _refused(self, bad: Mapping[str, Any]) -> None:
        try:
            self._client.submit(bad)
        except InvalidJob:
            return
        self._outcome.found.append("5 a bad job is refused: an unknown estimator was accepted")

    def _end(self, observer: Observer, job_id: JobId) -> None:
        """Pauses the job, looks at everything, cancels it, and looks again."""
        found = self._outcome.found
        self._client.pause(job_id)
        self._until(job_id, JobState.PAUSED)
        paused = self._seen(observer, job_id)
        found += violations(paused, self._watch.terms, {**ALWAYS, **QUIET})
        self._client.cancel(job_id)
        self._until(job_id, JobState.CANCELLED)
        ended = self._seen(observer, job_id)
        found += violations(ended, self._watch.terms, {**ALWAYS, **ENDED})
        if ended.trained() != paused.trained():
            found.append("1 trained once or dropped: the end of the job changed what was trained")
        found += checkpoint_is_whole(ended)
        found += nothing_forbidden([], observer.values(), os.environ["MILLRACE_TOKEN"])
        self._outcome.steps = ended.step

    def _seen(self, observer: Observer, job_id: JobId) -> Observation:
        deadline = time.monotonic() + self._shape.patience_s
        while (seen := observer.observe(job_id)) is None:
            if time.monotonic() > deadline:
                raise MillraceError(f"Redis has not answered for {self._shape.patience_s:g} s.")
            time.sleep(LOOK_S)
        return seen

    def _until(self, job_id: JobId, state: JobState) -> None:
        deadline = time.monotonic() + self._shape.patience_s
        while (view := self._client.job(job_id)).state is not state:
            if time.monotonic() > deadline:
                raise MillraceError(f"{job_id} is {view.state} and not {state} after {self._shape.patience_s:g} s.")
            time.sleep(LOOK_S)


MAY_COST_A_GROUP = (Target.SCORER, Target.REPLICA, Target.ENGINE)
"""Faults that may hit the one process that scores a group."""

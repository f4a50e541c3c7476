"""A running job, the faults that strike it one after another, and what each of them costs."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.chaos.invariants import Terms
from benchmarks.chaos.observation import Observer
from benchmarks.chaos.watch import Watch
from millrace.client import Client
from millrace.events import Event, EventKind, PublicationDone
from millrace.ids import JobId
from millrace.rest import MemberState
from tests.hosts.services import Services

PATIENCE_S = 600.0
NOTICE_S = 120.0
LOSSES = frozenset(
    {
        EventKind.TRAINER_LOST,
        EventKind.JOB_REWOUND,
        EventKind.MEMBER_OUT,
        EventKind.MEMBER_FAILED,
        EventKind.PUBLICATION_FAILED,
    }
)


@dataclass
class Cost:
    """What a fault came to. Seconds are counted from the fault."""

    fault: str
    noticed_s: float | None = None
    """Until an event named the culprit."""
    next_step_s: float | None = None
    """Until a step that began after the fault was trained."""
    whole_s: float | None = None
    """Until every member worked on the job again."""
    losses: list[Event] = field(default_factory=list)

    def row(self) -> str:
        seconds = (self.noticed_s, self.next_step_s, self.whole_s)
        return f"| {self.fault} | " + " | ".join("–" if s is None else f"{s:.1f} s" for s in seconds) + " |"


class Scenario:
    """One job of the services."""

    def __init__(self, services: Services, job_id: JobId, terms: Terms, replicas: Sequence[str]) -> None:
        """`replicas`: the host of each replica, as it registers."""
        self.services, self.job_id, self.terms = services, job_id, terms
        self._replicas = set(replicas)
        self._observer = Observer(services.state)
        self._watch = Watch(self._observer, job_id, terms, PATIENCE_S)
        self.found: list[str] = []
        """What contradicted a line of "What always holds"."""
        self.costs: list[Cost] = []

    def begin(self) -> None:
        """Waits until every member works, and for a step."""
        self.services.until("all members work", self._whole, PATIENCE_S)
        self.steps(1)

    def close(self) -> None:
        self._observer.close()

    @contextlib.contextmanager
    def fault(self, name: str, culprit: Callable[[Event], bool]) -> Iterator[Cost]:
        """The code inside strikes, and heals what has to be healed. Afterwards an event has named the `culprit`, the
        job has gone on, and all members work again."""
        struck_s = time.time()
        cost = Cost(name)
        yield cost
        recovery_s = self._watch.recovery(self.found)
        assert recovery_s is not None, f"{name}: no step within {PATIENCE_S:g} s\n{self.services.told()}"

        def named(client: Client) -> list[Event]:
            return [event for event in self._losses(client, struck_s) if culprit(event)]

        first, *_ = self.services.until(f"{name}: the culprit is named", named, NOTICE_S)
        cost.noticed_s = first.time_s - struck_s
        self.services.until(f"{name}: all members work", self._whole, PATIENCE_S)
        cost.whole_s = time.time() - struck_s
        cost.losses = self.services.at_the_desk(lambda client: self._losses(client, struck_s))
        cost.next_step_s = self._next_step_s(struck_s)
        self.costs.append(cost)
        print(cost.row(), flush=True)

    def _next_step_s(self, struck_s: float) -> float | None:
        rows = self.services.at_the_desk(lambda client: client.metrics(self.job_id))
        began = {row.time_s: row.time_s - row.values["timing_s/train"] for row in rows if row.step}
        return min((end - struck_s for end, start in began.items() if start >= struck_s), default=None)

    def _losses(self, client: Client, since_s: float) -> list[Event]:
        events = client.events(self.job_id, follow=False)
        return [event for event in events if event.kind in LOSSES and event.time_s >= since_s]

    def _whole(self, client: Client) -> bool:
        fleet = client.fleet()
        serving = {one.host for one in fleet.replicas if one.state is MemberState.SERVING}
        return bool(fleet.trainers) and self._replicas <= serving

    def wait(self, seconds: float) -> None:
        """The time that a fault lasts."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._watch.check(self.found)
            time.sleep(0.5)

    def member(self, host: str) -> str:
        """Id of the replica on a host."""
        fleet = self.services.at_the_desk(lambda client: client.fleet())
        return next(one.id for one in fleet.replicas if one.host == host)

    def steps(self, more: int) -> None:
        """Waits for so many more steps."""
        wanted = self.step + more
        self.services.until(f"step {wanted}", lambda client: client.job(self.job_id).step >= wanted, PATIENCE_S)
        self._watch.check(self.found)

    @property
    def step(self) -> int:
        return self.services.at_the_desk(lambda client: client.job(self.job_id)).step

    def events(self) -> list[Event]:
        return self.services.at_the_desk(lambda client: list(client.events(self.job_id, follow=False)))

    def publications(self, since_s: float) -> list[float]:
        """Seconds of the publications since a Unix time, without those that failed at first."""
        done = [event.data for event in self.events() if event.time_s >= since_s]
        return [float(one.seconds) for one in done if isinstance(one, PublicationDone) and not one.failures]

    def publishing_s(self, steps: int) -> float:
        """The median of the publications of the next steps."""
        since_s = time.time()
        self.steps(steps)
        return median(self.publications(since_s))

    def held_out(self, look: Callable[[float, float], bool]) -> tuple[float, float]:
        """The held-out reward before the first step and now, once `look` finds it good enough."""

        def both(client: Client) -> tuple[float, float] | None:
            job = client.job(self.job_id)
            before, last = job.evaluation_before, job.evaluation_last
            return (before, last) if before is not None and last is not None and look(before, last) else None

        found = self.services.until("the held-out reward rises", both, PATIENCE_S)
        assert found is not None
        return found

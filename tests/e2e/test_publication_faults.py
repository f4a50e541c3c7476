"""Faults in each phase of a sharded publication, over Gloo, with everything real: a trainer of two ranks, replicas as
processes, a coordinator. One job goes on through all of them, strictly on-policy, in float32."""

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from millrace.client import Client
from millrace.errors import MillraceError
from millrace.rest import Event
from tests.e2e.conftest import vowels_job
from tests.models import save_tiny_model
from tests.services.coordinator.conftest import CoordinatorProcess, running
from tests.services.trainer.process import TrainerProcess, trainer

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(300)]

DEADLINE_S = 5.0
LATEST_S = 60.0
"""By when whatever is waited for has come, however busy the machine; how long it took is printed at the end."""
PHASES = ("prepare", "transfer", "verify", "commit")


class HeldReplica:
    """A replica as its own process: see `held_replica`."""

    def __init__(self, folder: Path, coordinator: str) -> None:
        self.folder = folder
        folder.mkdir()
        log = (folder / "log").open("wb")
        options = ("--coordinator", coordinator, "--engine", "transformers", "--host", "127.0.0.1", "--port", "0")
        argv = (sys.executable, "-m", "tests.e2e.held_replica", str(folder), *options)
        self.process = subprocess.Popen(argv, stdout=log, stderr=log)
        self.alive = psutil.Process(self.process.pid)

    @property
    def member(self) -> str:
        """Empty until it is registered."""
        found = re.search(r"rollout-[0-9a-f]{6,}", (self.folder / "log").read_text(errors="replace"))
        return found[0] if found else ""

    def ask(self, what: str) -> None:
        (self.folder / what).touch()

    def let_go(self, phase: str) -> None:
        for name in (f"hold-{phase}", f"in-{phase}"):
            (self.folder / name).unlink(missing_ok=True)

    def is_in(self, phase: str) -> bool:
        return (self.folder / f"in-{phase}").exists()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(20)


class Whole:
    """Everything that runs, and the job."""

    def __init__(self, folder: Path, coordinator: CoordinatorProcess) -> None:
        self.folder, self.coordinator = folder, coordinator
        self.replicas: list[HeldReplica] = []
        self.recovered: list[tuple[str, float]] = []
        """Fault, and seconds until the version, or a newer one, was served again."""
        self._told: list[Event] = []
        self._trainers = contextlib.ExitStack()
        self.trainer = self.another_trainer()

    @property
    def client(self) -> Client:
        return self.coordinator.client

    def another_trainer(self) -> TrainerProcess:
        self._trainers.close()
        at: Any = SimpleNamespace(address=self.coordinator.address, script=SimpleNamespace(members={}))
        self.trainer = self._trainers.enter_context(trainer(at, self.folder / "trainer.log", ranks=2))
        return self.trainer

    def another_replica(self) -> HeldReplica:
        number = len(list(self.folder.glob("replica-*")))
        self.replicas.append(HeldReplica(self.folder / f"replica-{number}", self.coordinator.address))
        return self.replicas[-1]

    def events(self, kind: str, since: float = 0.0) -> list[Event]:
        with contextlib.suppress(MillraceError):  # a coordinator that is just starting
            self._told += self.client.events(self.job, after=self._told[-1].id if self._told else "", follow=False)
        return [event for event in self._told if event.kind == kind and event.time_s > since]

    def serving(self) -> set[str]:
        with contextlib.suppress(MillraceError):
            return {m.id for m in self.client.fleet().replicas if m.state == "serving" and m.silent_s < 2.0}
        return set()

    def complete(self) -> None:
        """Waits until every replica that runs serves."""
        until("all are known", lambda: all(r.member for r in self.replicas))
        until("all replicas serve", lambda: self.serving() >= {r.member for r in self.replicas})

    def victim(self, phase: str) -> HeldReplica:
        """A replica that stands in `phase` of a publication to two."""
        self.complete()
        held = self.replicas[-1]
        held.ask(f"hold-{phase}")
        until(f"a publication reaches {phase}", lambda: held.is_in(phase))
        return held

    def recovers(self, fault: str, since: float, after: float = 0.0) -> list[Event]:
        """The publications that reached a replica after the fault, and `after`."""
        at = max(since, after)
        done = until(f"a publication after {fault}", lambda: self.events("publication.done", at))
        self.recovered.append((fault, done[0].time_s - since))
        return done

    def lose(self, replica: HeldReplica) -> None:
        replica.end()
        self.replicas.remove(replica)

    def mend(self) -> None:
        """Leaves two replicas and a trainer to the next test, whatever this one came to."""
        for replica in list(self.replicas):
            for phase in (*PHASES, "copy"):
                replica.let_go(phase)
            if replica.process.poll() is not None:
                self.replicas.remove(replica)
            else:
                replica.alive.send_signal(signal.SIGCONT)
        while len(self.replicas) < 2:
            self.another_replica()
        if self.trainer.process.poll() is not None:
            self.another_trainer()
        if self.client.job(self.job).state == "paused":
            self.client.resume(self.job)

    def close(self) -> None:
        for replica in self.replicas:
            replica.end()
        self._trainers.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    folder = tmp_path_factory.mktemp("faults")
    with running(folder / "coordinator") as coordinator:
        everything = Whole(folder, coordinator)
        try:
            job = vowels_job(folder, save_tiny_model(folder / "model", tied=True))
            job["rollout"] |= {
                "max_response_tokens": 24,
                "samples_per_prompt": 2,
                "engine_options": {"max_num_seqs": 8},
            }
            job["schedule"] |= {"steps": 100_000, "prompts_per_step": 4, "max_staleness": 0}
            job["deadlines"] = {"publication_s": DEADLINE_S}
            job["publication"] = {"path": "sharded"}
            everything.job = everything.client.submit(job).id
            for _ in range(2):
                everything.another_replica()
            yield everything
            for fault, seconds in everything.recovered:
                print(f"| {fault} | {seconds:.2f} |")
        finally:
            everything.close()


@pytest.fixture(autouse=True)
def sound(whole: Whole) -> Iterator[None]:
    """After every test the job runs, nothing that was trained on was mixed, and the ledger adds up."""
    yield
    whole.mend()
    view = until("the job runs", lambda: _running(whole))
    assert view.state == "running", view.failure
    apart = [row.values.get("training/rollout_logprobs_diff_max", 0.0) for row in whole.client.metrics(whole.job)]
    assert max(apart, default=0.0) < 1e-2, "every token was sampled from the version that it names"
    ledger = whole.client.ledger(whole.job)
    assert ledger.issued == ledger.queued + ledger.leased + ledger.generated + ledger.trained + ledger.dropped


def _running(whole: Whole) -> Any:
    """The job, unless it is paused."""
    view = whole.client.job(whole.job)
    return view if view.state != "paused" else None


def until(what: str, holds: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LATEST_S
    while not (value := holds()):
        assert time.monotonic() < deadline, f"{what}: not within {LATEST_S:g} s"
        time.sleep(0.05)
    return value


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver_is_lost(whole: Whole, how: signal.Signals, phase: str) -> None:
    victim = whole.victim(phase)
    member, since = victim.member, time.time()
    victim.alive.send_signal(how)
    (failed,) = until("the failure is told", lambda: whole.events("publication.failed", since))
    assert failed.data["culprits"] == [member] and failed.data["phase"] == phase
    assert failed.time_s - since < 3 * DEADLINE_S
    done = whole.recovers(f"receiver {how.name} in {phase}", since)
    assert member not in {m["member"] for m in done[0].data["members"]}
    victim.let_go(phase)
    if how == signal.SIGKILL:
        whole.lose(victim)
        whole.another_replica()
    else:
        victim.alive.send_signal(signal.SIGCONT)
    whole.complete()


@pytest.mark.parametrize("what", ["replan", "corrupt"])
def test_a_receiver_plans_otherwise_or_gets_a_changed_byte(whole: Whole, what: str) -> None:
    whole.complete()
    odd, since = whole.replicas[-1], time.time()
    odd.ask(what)
    (failed,) = until("the failure is told", lambda: whole.events("publication.failed", since))
    assert failed.data["culprits"] == [odd.member]
    assert failed.data["phase"] == ("prepare" if what == "replan" else "verify")
    told = {"replan": "worked out another plan", "corrupt": "arrived at .* changed"}
    assert re.search(told[what], failed.message)
    whole.recovers({"replan": "plan mismatch", "corrupt": "corrupted byte"}[what], failed.time_s)
    whole.complete()


@pytest.mark.parametrize("phase", PHASES)
def test_the_coordinator_is_killed_and_started_again(whole: Whole, phase: str) -> None:
    victim = whole.victim(phase)
    whole.coordinator.kill()
    since = time.time()
    whole.coordinator.start()
    victim.let_go(phase)
    whole.recovers(f"coordinator restart in {phase}", since)
    whole.complete()


@pytest.mark.parametrize("phase", PHASES)
def test_a_sender_rank_is_killed(whole: Whole, phase: str) -> None:
    victim = whole.victim(phase)
    whole.trainer.ranks()[1].kill()
    since = time.time()
    victim.let_go(phase)
    until("the loss is told", lambda: whole.events("trainer.lost", since))
    assert whole.trainer.process.wait(30) != 0
    whole.another_trainer()
    configured = until("the next takes the job up", lambda: whole.events("trainer.configured", since))
    whole.recovers(f"sender rank SIGKILL in {phase}", since, after=configured[0].time_s)
    whole.complete()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sibling_is_lost_while_it_copies(whole: Whole, how: signal.Signals) -> None:
    """The joiner gets its weights from the trainer."""
    whole.complete()
    whole.client.pause(whole.job)
    until("no publication is to come", lambda: whole.client.job(whole.job).state == "paused")
    for replica in whole.replicas:
        replica.ask("hold-copy")
    late = whole.another_replica()
    sibling = until("a sibling sends", lambda: next((r for r in whole.replicas if r.is_in("copy")), None))
    since = time.time()
    sibling.alive.send_signal(how)
    until("it serves", lambda: late.member in whole.serving())
    whole.recovers(f"sibling {how.name} while it copies", since)
    done = [e for e in whole.events("publication.done", since) if late.member in str(e.data["members"])]
    assert done[0].data["source"] == "trainer"
    for replica in whole.replicas:
        replica.let_go("copy")
    if how == signal.SIGSTOP:
        sibling.alive.send_signal(signal.SIGCONT)
    whole.lose(sibling)
    whole.client.resume(whole.job)
    whole.complete()

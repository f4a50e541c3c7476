"""Faults in each phase of a sharded publication, and the system that undergoes them: a coordinator, a trainer of two
ranks and two replicas, each its own process, on the CPU over Gloo or on GPUs over NCCL.

A fault is done to a whole system, checks how it was told, and returns the seconds until the version, or a newer one,
was served again by whoever is left.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from millrace.client import Client
from millrace.errors import MillraceError
from millrace.events import Event
from tests.forked import Forked
from tests.processes import runs
from tests.services.coordinator.conftest import CoordinatorProcess
from tests.services.trainer.process import TrainerProcess, trainer

PHASES = ("prepare", "transfer", "verify", "commit")
RANKS = 2
REPLICAS = 2
Fault = Callable[["Whole"], float]


class HeldReplica:
    """A replica as its own process: see `held_replica`. On `device`, as CUDA_VISIBLE_DEVICES names it."""

    def __init__(self, folder: Path, coordinator: str, engine: str, device: str) -> None:
        self.folder, self.device = folder, device
        folder.mkdir()
        options = ("--coordinator", coordinator, "--engine", engine, "--host", "127.0.0.1", "--port", "0")
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device}
        self.process = _start("tests.e2e.held_replica", (str(folder), *options), environment, folder / "log", engine)
        self._tree = [psutil.Process(self.process.pid)]

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

    def strike(self, how: signal.Signals) -> None:
        """SIGSTOP and SIGCONT come to its engine's processes too, as if its host hung. SIGKILL comes to the replica
        alone: nothing of the engine may outlive it."""
        self._look_below()
        for process in self._tree[:1] if how == signal.SIGKILL else self._tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(how)

    def _look_below(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            below = self._tree[0].children(recursive=True)
            self._tree += [process for process in below if process not in self._tree]

    @property
    def left(self) -> list[str]:
        """What runs of it."""
        self.process.poll()  # buries it
        return [name for process in self._tree if (name := _running(process))]

    def end(self) -> None:
        self._look_below()
        for process in self._tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(60)


def _start(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path, engine: str
) -> Forked | subprocess.Popen[bytes]:
    if engine == "transformers":
        return Forked(module, arguments, environment, log)
    with log.open("wb") as file:
        return subprocess.Popen((sys.executable, "-m", module, *arguments), stdout=file, stderr=file, env=environment)


def _running(process: psutil.Process) -> str:
    """Its command, if it runs and is no zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if runs(process):
            return " ".join(process.cmdline()) or process.name()
    return ""


class Whole:
    """Everything that runs, and the job."""

    def __init__(
        self,
        folder: Path,
        coordinator: CoordinatorProcess,
        *,
        engine: str = "transformers",
        devices: Sequence[str] = (),
        deadline_s: float,
        latest_s: float,
    ) -> None:
        """On `devices`, as CUDA_VISIBLE_DEVICES names them: one a rank of the trainer, then one a replica; without any,
        on the CPU. A publication has `deadline_s`. Whatever is waited for has come by `latest_s`."""
        self.folder, self.coordinator, self.engine, self.devices = folder, coordinator, engine, devices
        self.deadline_s, self.latest_s = deadline_s, latest_s
        self.job = ""
        self.replicas: list[HeldReplica] = []
        self.recovered: dict[str, float] = {}
        """Fault → seconds."""
        self._told: list[Event] = []
        self._trainers = contextlib.ExitStack()
        self.trainer = self.another_trainer()

    @property
    def client(self) -> Client:
        return self.coordinator.client

    def begin(self, job: dict[str, Any]) -> None:
        """Strictly on-policy, and without an end."""
        job["rollout"] |= {"max_response_tokens": 24, "samples_per_prompt": 2}
        job["schedule"] |= {"steps": 100_000, "prompts_per_step": 4, "max_staleness": 0}
        job["deadlines"] = {"publication_s": self.deadline_s}
        job.setdefault("publication", {"path": "sharded"})
        self.job = self.client.submit(job).id
        for _ in range(REPLICAS):
            self.another_replica()

    def another_trainer(self) -> TrainerProcess:
        self._trainers.close()
        at: Any = SimpleNamespace(address=self.coordinator.address, script=SimpleNamespace(members={}))
        log = self.folder / f"trainer-{len(list(self.folder.glob('trainer-*')))}.log"
        how = {"by_command": bool(self.devices), "CUDA_VISIBLE_DEVICES": ",".join(self.devices[:RANKS])}
        self.trainer = self._trainers.enter_context(trainer(at, log, ranks=RANKS, **how))
        return self.trainer

    @property
    def _places(self) -> list[str]:
        """The devices that no replica is on: NCCL takes no two ranks on one."""
        return [device for device in self.devices[RANKS:] if device not in {r.device for r in self.replicas}]

    @property
    def full(self) -> bool:
        """Whether there is no device for another replica."""
        return bool(self.devices) and not self._places

    def another_replica(self) -> HeldReplica:
        assert not self.full
        folder = self.folder / f"replica-{len(list(self.folder.glob('replica-*')))}"
        device = self._places[0] if self.devices else ""
        self.replicas.append(HeldReplica(folder, self.coordinator.address, self.engine, device))
        return self.replicas[-1]

    def until(self, what: str, holds: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + self.latest_s
        while not (value := holds()):
            if time.monotonic() > deadline:
                self.events("")
                told = "\n".join(event.message for event in self._told[-8:])
                raise AssertionError(f"{what}: not within {self.latest_s:g} s\n{told}")
            time.sleep(0.05)
        return value

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
        self.until("all are known", lambda: all(r.member for r in self.replicas))
        self.until("all replicas serve", lambda: self.serving() >= {r.member for r in self.replicas})

    def victim(self, phase: str) -> HeldReplica:
        """A replica that stands in `phase` of a publication to two."""
        self.complete()
        held = self.replicas[-1]
        held.ask(f"hold-{phase}")
        self.until(f"a publication reaches {phase}", lambda: held.is_in(phase))
        return held

    def recovers(self, since: float) -> list[Event]:
        """The publications that reached a replica after `since`."""
        done: list[Event] = self.until("a publication is done", lambda: self.events("publication.done", since))
        return done

    def lose(self, replica: HeldReplica) -> None:
        """For good. Nothing of one that was killed is left; others are ended here."""
        if replica.process.poll() is not None:
            self.until(f"nothing is left of {replica.member}", lambda: not replica.left)
        replica.end()
        self.replicas.remove(replica)

    def fix(self) -> None:
        """Leaves two replicas and a trainer to the next fault, whatever the last one came to."""
        for replica in list(self.replicas):
            for phase in (*PHASES, "copy"):
                replica.let_go(phase)
            if replica.process.poll() is not None:
                replica.end()
                self.replicas.remove(replica)
            else:
                replica.strike(signal.SIGCONT)
        while len(self.replicas) < REPLICAS:
            self.another_replica()
        if self.trainer.process.poll() is not None:
            self.another_trainer()
        if self.client.job(self.job).state == "paused":
            self.client.resume(self.job)

    def check_sound(self, metric: str, apart: float) -> None:
        """The job runs, nothing that was trained on was mixed, so that `metric` of engine and trainer was below `apart`
        at every step, and the ledger adds up."""
        view = self.until("the job runs", self._resumed)
        assert view.state == "running", view.failure
        seen = [row.values.get(metric, 0.0) for row in self.client.metrics(self.job)]
        assert max(seen, default=0.0) < apart, "every token was sampled from the version that it names"
        ledger = self.client.ledger(self.job)
        assert ledger.issued == ledger.queued + ledger.leased + ledger.generated + ledger.trained + ledger.dropped

    def _resumed(self) -> Any:
        """The job, unless it is paused."""
        view = self.client.job(self.job)
        return view if view.state != "paused" else None

    def undergo(self, fault: str) -> None:
        """One of FAULTS. How long it took is printed at the end."""
        self.recovered[fault] = FAULTS[fault](self)

    def close(self) -> None:
        for replica in self.replicas:
            replica.end()
        for process in self.trainer.tree():  # draining would wait for the job's step
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._trainers.close()
        for fault, seconds in self.recovered.items():
            print(f"| {self.engine} | {fault} | {seconds:.2f} |")

    def logs(self) -> str:
        """The last lines that each process wrote."""
        paths = [*self.folder.glob("trainer-*.log"), *self.folder.glob("replica-*/log")]
        return "\n\n".join(f"{path}:\n{path.read_text(errors='replace')[-3000:]}" for path in paths)


def a_receiver_is_lost(whole: Whole, how: signal.Signals, phase: str) -> float:
    victim = whole.victim(phase)
    member, since = victim.member, time.time()
    victim.strike(how)
    (failed,) = whole.until("the failure is told", lambda: whole.events("publication.failed", since))
    told = (phase,)
    if phase == "transfer" and whole.devices:
        # NCCL takes small messages for a receiver that does not look: the sender is through, and it is missed later.
        told = ("transfer", "verify")
    elif phase == "commit":
        told = ("verify",)  # one call asks for both, and the receiver does not say how far it came
    assert failed.data.culprits == [member] and failed.data.phase in told, failed
    assert failed.time_s - since < 3 * whole.deadline_s, failed
    done = whole.recovers(since)
    assert member not in {m.member for m in done[0].data.members}, done[0]
    victim.let_go(phase)
    if how == signal.SIGKILL:
        victim.process.wait(60)
        whole.lose(victim)
        whole.another_replica()
    else:
        victim.strike(signal.SIGCONT)
    whole.complete()
    return done[0].time_s - since


def a_receiver_is_told(whole: Whole, what: str, phase: str, told: str) -> float:
    """It plans otherwise, or gets a changed byte. The seconds are those from when that was found."""
    whole.complete()
    odd, since = whole.replicas[-1], time.time()
    odd.ask(what)
    (failed,) = whole.until("the failure is told", lambda: whole.events("publication.failed", since))
    assert failed.data.culprits == [odd.member] and failed.data.phase == phase, failed
    assert re.search(told, failed.message), failed
    done = whole.recovers(failed.time_s)
    whole.complete()
    return done[0].time_s - failed.time_s


def the_coordinator_restarts(whole: Whole, phase: str) -> float:
    victim = whole.victim(phase)
    whole.coordinator.kill()
    since = time.time()
    whole.coordinator.start()
    victim.let_go(phase)
    done = whole.recovers(since)
    whole.complete()
    return done[0].time_s - since


def a_sender_rank_is_killed(whole: Whole, phase: str) -> float:
    """The whole trainer is started anew."""
    victim = whole.victim(phase)
    whole.trainer.ranks()[1].kill()
    since = time.time()
    victim.let_go(phase)
    whole.until("the loss is told", lambda: whole.events("trainer.lost", since))
    assert whole.trainer.process.wait(whole.latest_s) != 0
    whole.another_trainer()
    configured = whole.until("the next takes the job up", lambda: whole.events("trainer.configured", since))
    done = whole.recovers(configured[0].time_s)
    whole.complete()
    return done[0].time_s - since


def a_sibling_is_lost(whole: Whole, how: signal.Signals) -> float:
    """While it copies to a replica that joins, which then gets its weights from the trainer."""
    whole.complete()
    whole.client.pause(whole.job)
    whole.until("no publication is to come", lambda: whole.client.job(whole.job).state == "paused")
    if whole.full:
        whole.lose(whole.replicas[0])
    for replica in whole.replicas:
        replica.ask("hold-copy")
    late = whole.another_replica()
    sibling = whole.until("a sibling sends", lambda: next((r for r in whole.replicas if r.is_in("copy")), None))
    since = time.time()
    sibling.strike(how)
    whole.until("it serves", lambda: late.member in whole.serving())
    served = whole.recovers(since)
    done = [e for e in whole.events("publication.done", since) if late.member in {m.member for m in e.data.members}]
    assert done[0].data.source == "trainer", done[0]
    for replica in whole.replicas:
        replica.let_go("copy")
    if how == signal.SIGKILL:
        sibling.process.wait(60)
    else:
        sibling.strike(signal.SIGCONT)
    whole.lose(sibling)
    whole.client.resume(whole.job)
    whole.complete()
    return served[0].time_s - since


LOSSES = (signal.SIGKILL, signal.SIGSTOP)
FAULTS: Mapping[str, Fault] = {
    **{
        f"receiver {how.name} in {phase}": partial(a_receiver_is_lost, how=how, phase=phase)
        for how in LOSSES
        for phase in PHASES
    },
    "plan mismatch": partial(a_receiver_is_told, what="replan", phase="prepare", told="worked out another plan"),
    "corrupted byte": partial(a_receiver_is_told, what="corrupt", phase="verify", told="arrived at .* changed"),
    **{f"coordinator restart in {phase}": partial(the_coordinator_restarts, phase=phase) for phase in PHASES},
    **{f"sender rank SIGKILL in {phase}": partial(a_sender_rank_is_killed, phase=phase) for phase in PHASES},
    **{f"sibling {how.name} while it copies": partial(a_sibling_is_lost, how=how) for how in LOSSES},
}

"""Starts the services in order, starts again what dies, stops them in the opposite order."""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from millrace import shared_copies
from millrace.client import Client
from millrace.errors import InvalidState, MillraceError, Unavailable
from millrace.local import child_processes, state_folder
from millrace.local.folders import new_private_folder
from millrace.local.launcher import STANDBY
from millrace.local.lives import Restarts, joined
from millrace.local.options import Service, StackOptions, of_this_host
from millrace.local.ports import check_free
from millrace.local.service_log import ServiceLog, say
from millrace.local.state_folder import only_one
from millrace.rest import MemberState
from millrace.wire import last_words
from millrace.wire.membership import DRAINED_FILE, LIFE_FILE

LOOK_S = 0.2
"""How often a process is looked at: it costs nothing and nobody notices the difference."""
COORDINATOR_READY_S = 60.0
STANDBY_AFTER_S = 20.0
"""How long a service runs before its standby is started, which imports much: not while the service itself starts."""
HURRY_S = 5.0
"""How long replicas finish their leases when the whole stack stops. What is left is issued again by its next start."""
LEAST_FREE_BYTES = 1 << 20
"""A disk with less room counts as full."""
SILENT_S = 120.0
"""A replica that has sent no heartbeat for this many seconds is killed and started again. The coordinator has given it
up long before."""


class Supervisor:
    """One stack, from start to stop. `run` returns the exit status."""

    def __init__(
        self, options: StackOptions, members: Sequence[Service], resized: Callable[[StackOptions], Sequence[Service]]
    ) -> None:
        """`resized` gives the services of other options. Raises InvalidState if this host cannot run them."""
        self.options = options
        self.services = list(members)
        self.resized = resized
        self.logs = {s.name: ServiceLog(options.folder / "logs", s.name) for s in self.services}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.standbys: dict[str, subprocess.Popen[bytes]] = {}
        """The process that takes over when a service's own has ended, by service; not every service has one."""
        self.given_up: set[str] = set()
        self.kept: set[str] = set()
        """Names of the services that run, or wait to be started again."""
        self.leaving: set[str] = set()
        """Names of the replicas that drain because fewer are wanted."""
        self.scaled: dict[str, Any] = {}
        """The answer to the last request of `millrace scale`."""
        self.complete = False
        self.full = False
        """The disk of the state folder has no room."""
        self.stopping = asyncio.Event()
        self.failure: MillraceError | None = None

    async def run(self) -> int:
        """Until SIGTERM or SIGINT (0), or until a service that the stack cannot do without cannot run here (1)."""
        check_free(self.options.ports)
        child_processes.adopt_orphans()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self.stopping.set)
        before = 1 + [service.name for service in self.services].index("coordinator")
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.echo())
                for service in self.services[:before]:
                    tasks.create_task(self.keep(service))
                await self.coordinator_ready()
                for service in self.services[before:]:
                    tasks.create_task(self.keep(service))
                tasks.create_task(self.announce())
                await self.follow(tasks)
        finally:
            await self.stop()
            shared_copies.collect()
        if self.failure is not None:
            say("millrace", str(self.failure))
        return 1 if self.failure is not None else 0

    async def follow(self, tasks: asyncio.TaskGroup) -> None:
        """Starts and drains replicas as `millrace scale` asks for it, until the stack stops."""
        waiting: set[str] = set()
        while not self.stopping.is_set():
            request = state_folder.asked(self.options.folder)
            if request is not None and request.key != self.scaled.get("key"):
                self.scaled = {"key": request.key, **self.rescale(request.replicas)}
                waiting = {s.name for s in self.services if not s.vital} - self.leaving
                self.write_state()
            for service in self.services:
                if service.name in waiting - self.kept:  # one that still drains is started again afterwards
                    waiting.remove(service.name)
                    tasks.create_task(self.keep(service))
            await asyncio.sleep(LOOK_S)

    def rescale(self, replicas: int) -> dict[str, Any]:
        """Sets the number of replicas; those with the highest numbers leave. Answers which ones come and go, or why
        this host cannot run them."""
        options = replace(self.options, replicas=replicas)
        try:
            wanted = list(self.resized(options))
        except InvalidState as error:
            return {"what": error.what, "fix": error.fix}
        names = {service.name for service in wanted}
        left = [service for service in self.services if service.name not in names and service.name in self.kept]
        changed = [*sorted(names - self.kept), *(service.name for service in left)]
        self.options, self.services = options, [*wanted, *left]
        self.leaving = {service.name for service in left}
        self.given_up -= names
        for name in names - self.logs.keys():
            self.logs[name] = ServiceLog(options.folder / "logs", name)
        say("millrace", f"{replicas} replicas are wanted: {', '.join(changed) or 'none'} start or leave.")
        return {"changed": changed}

    async def keep(self, service: Service) -> None:
        """Runs `service` until the stack stops, somebody drains it or it is not wanted any more, however often it dies:
        within a bound if it does not come as far as the fleet."""
        self.kept.add(service.name)
        try:
            await self._keep(service)
        finally:
            self.kept.discard(service.name)

    async def _keep(self, service: Service) -> None:
        restarts, asked = Restarts(), False
        while not self.stopping.is_set() and service.name not in self.leaving:
            started_s = time.monotonic()
            process = self.start(service)
            while process.poll() is None:
                if self.stopping.is_set():
                    return
                if service.name in self.leaving and not asked:
                    asked = True
                    process.terminate()
                if not service.vital and self.stands_still(service):
                    say("millrace", f"{service.name} has not sent a heartbeat for {SILENT_S:g} s and is killed.")
                    self.life_file(service).unlink()
                    process.kill()
                if service.standby and self.complete and time.monotonic() - started_s > STANDBY_AFTER_S:
                    self.prepare_standby(service)
                await asyncio.sleep(LOOK_S)
            del self.running[service.name]
            self.clear_orphans()
            if asked:
                self.write_state()
                say("millrace", f"{service.name} has drained and left.")
                return
            if self.drained_file(service).exists():
                self.write_state()
                then = "it is not started again. `millrace scale` or the next `millrace up` starts it."
                say("millrace", f"{service.name} was drained and has left the fleet; {then}")
                return
            lived_s = time.monotonic() - started_s
            had_joined = joined(self.words_folder(service))
            wait_s = restarts.wait_s(time.monotonic(), joined=had_joined, least_s=service.least_wait_s)
            self.tell_death(service, process.returncode, lived_s, wait_s, restarts)
            if wait_s is None:
                self.give_up(service)
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.stopping.wait()

    def start(self, service: Service) -> subprocess.Popen[bytes]:
        self.words_folder(service).mkdir(parents=True, exist_ok=True)
        member = self.words_folder(service) / last_words.MEMBER
        for file in (self.drained_file(service), self.life_file(service), member):
            file.unlink(missing_ok=True)
        process = self.standbys.pop(service.name, None)
        with self.logs[service.name].opened(service.argv) as output:
            if process is None or not _took_over(process):
                process = child_processes.start(service.argv, self.environment(service), output)
        self.running[service.name] = process
        self.write_state()
        return process

    def prepare_standby(self, service: Service) -> None:
        """Starts the standby of `service`, if there is none. One that ends by itself is not started again before it
        is needed."""
        if service.name not in self.standbys:
            environment = {**self.environment(service), STANDBY: "1"}
            with self.logs[service.name].to_append() as output:
                self.standbys[service.name] = child_processes.start(
                    service.argv, environment, output, stdin=subprocess.PIPE
                )

    def environment(self, service: Service) -> dict[str, str]:
        files = {DRAINED_FILE: str(self.drained_file(service)), LIFE_FILE: str(self.life_file(service))}
        return {**service.environment, **files, last_words.FOLDER: str(self.words_folder(service))}

    def drained_file(self, service: Service) -> Path:
        """The file that the service makes when somebody drains it."""
        return self.options.folder.resolve() / f"{service.name}.drained"

    def life_file(self, service: Service) -> Path:
        """The file that the service touches before each heartbeat."""
        return self.options.folder.resolve() / f"{service.name}.life"

    def words_folder(self, service: Service) -> Path:
        """The folder in which the service's processes leave how they ended, and that they had joined the fleet."""
        return self.options.folder.resolve() / "lives" / service.name

    def stands_still(self, service: Service) -> bool:
        """Whether the service has begun to send heartbeats and has stopped to, without having ended."""
        try:
            return time.monotonic() - self.life_file(service).stat().st_mtime > SILENT_S
        except FileNotFoundError:
            return False

    def clear_orphans(self) -> None:
        """What a dead service left behind (its Redis, its engine, its ranks) must not meet its successor."""
        keep = [process.pid for process in (*self.running.values(), *self.standbys.values())]
        if left := child_processes.sweep(keep):
            say("millrace", f"processes {left} do not end; they hold memory and may hold ports.")

    def tell_death(
        self, service: Service, status: int, lived_s: float, wait_s: float | None, restarts: Restarts
    ) -> None:
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        then = (
            f"it is started again in {wait_s:g} s ({restarts.last_restart})"
            if wait_s is not None
            else f"it died {restarts.limit + 1} times and is not started again"
        )
        log = self.logs[service.name]
        if status > 0:
            say(service.name, "\n".join(log.last_lines(12)))
        say("millrace", f"{service.name} {how} after {lived_s:.0f} s; {then}. Its log: {log.path}")

    def give_up(self, service: Service) -> None:
        self.given_up.add(service.name)
        if {s.name for s in self.services if s.kind == service.kind} <= self.given_up:
            self.failure = Unavailable(
                f"{service.name} keeps dying and the stack is of no use without it.",
                f"look at {self.logs[service.name].path}, and run `millrace doctor`.",
            )
            self.stopping.set()

    async def coordinator_ready(self) -> None:
        """Waits for the coordinator to take jobs: the other services need it to register."""
        deadline = time.monotonic() + COORDINATOR_READY_S
        with Client(self.options.url, patience_s=0) as client:
            while not self.stopping.is_set() and not await asyncio.to_thread(client.ready):
                if time.monotonic() > deadline:
                    path = self.logs["coordinator"].path
                    self.failure = Unavailable(
                        f"the coordinator is not ready after {COORDINATOR_READY_S:g} s.", f"look at {path}."
                    )
                    self.stopping.set()
                await asyncio.sleep(LOOK_S)
        if not self.stopping.is_set():
            say("millrace", f"the coordinator is ready at {client.url}; the trainer and the replicas start now.")
            if self.options.standby_coordinators:
                both = f"MILLRACE_URL={self.options.url} MILLRACE_COORDINATOR={self.options.coordinator}"
                say("millrace", f"others stand by. Clients and further replicas reach whichever leads with {both}")

    async def announce(self) -> None:
        """Says once that every member has joined."""
        begun = time.monotonic()
        with Client(self.options.url, patience_s=0) as client:
            while not self.stopping.is_set():
                with contextlib.suppress(Unavailable):
                    fleet = await asyncio.to_thread(client.fleet)
                    replicas = [m for m in fleet.replicas if m.state not in (MemberState.LEFT, MemberState.LOST)]
                    if len(fleet.trainers) > self.options.standby_trainers and len(replicas) >= self.options.replicas:
                        break
                await asyncio.sleep(LOOK_S)
        if self.stopping.is_set():
            return
        self.complete = True
        self.write_state()
        joined = f"trainer ({self.options.ranks} ranks) and {self.options.replicas} {self.options.engine} replicas"
        say("millrace", f"{joined} joined after {time.monotonic() - begun:.0f} s: the stack is up. Ctrl-C stops it.")

    async def echo(self) -> None:
        """Repeats the services' warnings and errors on the console."""
        while not self.stopping.is_set():
            self.tell_room()
            for name, log in self.logs.items():
                for line in log.loud_lines() if log.path.exists() else ():
                    say(name, line)
            await asyncio.sleep(LOOK_S)

    def tell_room(self) -> None:
        """Says once that the disk of the state folder is full, and once that it has room again."""
        full = shutil.disk_usage(self.options.folder).free < LEAST_FREE_BYTES
        if full != self.full:
            self.full = full
            costs = "log lines are lost, and jobs wait as soon as Redis cannot write. Fix: free some room"
            state = f"is full: {costs}." if full else "has room again."
            say("millrace", f"the disk of {self.options.folder.resolve()} {state}")
            if not full:
                self.write_state()

    async def stop(self) -> None:
        """Replicas first, then trainers, then coordinators, their Redis last; who does not stop in time is killed."""
        say("millrace", "stopping.")
        self.standbys.clear()  # they are orphans now
        for stage in self.stages():
            for _, process in stage:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
            if all(not service.vital for service, _ in stage):
                for _, process in stage:
                    if not await _ended(process, HURRY_S):
                        process.send_signal(signal.SIGTERM)  # the second one does not wait for leases
            for service, process in stage:
                if not await _ended(process, service.grace_s):
                    say("millrace", f"{service.name} did not stop within {service.grace_s:g} s and is killed.")
                    process.kill()
                    process.wait()
                del self.running[service.name]
            self.clear_orphans()
        self.complete = False
        self.write_state()
        say("millrace", f"stopped. State and logs: {self.options.folder.resolve()}")

    def stages(self) -> Iterator[list[tuple[Service, subprocess.Popen[bytes]]]]:
        """What is stopped together: the services of one kind. The kinds follow in the opposite order of their start."""
        running = [(s, self.running[s.name]) for s in reversed(self.services) if s.name in self.running]
        yield from (list(group) for _, group in itertools.groupby(running, lambda each: each[0].kind))

    def write_state(self) -> None:
        """`stack.json`: where the stack is reached and the pid of each process; whole at every moment."""
        state = {
            "url": self.options.url,
            "grpc": self.options.coordinator,
            "complete": self.complete,
            "watchdog": os.getppid(),
            "supervisor": os.getpid(),
            "replicas": self.options.replicas,
            "autoscale": self.options.autoscale,
            "scale": self.scaled,
            "processes": {name: process.pid for name, process in self.running.items()},
        }
        path = self.options.folder / state_folder.STATE
        scratch = path.with_suffix(".part")
        try:
            scratch.write_text(json.dumps(state, indent=1))
            scratch.replace(path)
        except OSError as error:
            say("millrace", f"{path} cannot be written: {error.strerror}. It names the processes of before.")


def _took_over(standby: subprocess.Popen[bytes]) -> bool:
    """Tells a standby that it is the service now. Answers whether it is still there."""
    assert standby.stdin is not None
    try:
        standby.stdin.write(b"\n")
        standby.stdin.close()
    except BrokenPipeError:
        return False
    return standby.poll() is None


async def _ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while process.poll() is None:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(LOOK_S / 4)
    return True


def supervise(
    options: StackOptions,
    members: Sequence[Service],
    resized: Callable[[StackOptions], Sequence[Service]] = of_this_host,
) -> int:
    """The supervisor's process, one at a time on a state folder. A failure to start is printed in one line."""
    new_private_folder(options.folder)
    try:
        with only_one(options.folder):
            (options.folder / state_folder.REQUEST).unlink(missing_ok=True)
            return asyncio.run(Supervisor(options, members, resized).run())
    except MillraceError as error:
        say("millrace", str(error))
        return 1

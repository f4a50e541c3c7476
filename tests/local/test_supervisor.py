"""A supervised stack with a real coordinator and Redis, whose trainer and its child do not want to die."""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.client import Client
from millrace.errors import InvalidState
from millrace.local.state_folder import scale
from tests.forked import run_forked
from tests.local.programs import TAKING_OVER, alive, eventually, supervising
from tests.ports import held_port
from tests.processes import runs
from tests.small_disk import filled, small_disk

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="subreapers and PR_SET_PDEATHSIG are Linux's"),
]

WATCHING = "import sys; from millrace.local.child_processes import watchdog; raise SystemExit(watchdog(sys.argv[1:]))"


class Running:
    """A watched stack in `state`, its console, and what is left of it."""

    def __init__(self, state: Path) -> None:
        self.state, self.mark = state, secrets.token_hex(8)
        self._held = contextlib.ExitStack()
        self.http_port, self.grpc_port = (self._held.enter_context(held_port()) for _ in range(2))
        argv = supervising(state, self.http_port, self.grpc_port, self.mark)
        self.watchdog = subprocess.Popen(
            (sys.executable, "-c", WATCHING, *argv), stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def wait_until_up(self) -> None:
        eventually(lambda: {"coordinator", "trainer", "rollout-0"} <= set(self.pids()), 120)
        eventually(lambda: len(self.services()) >= 5)  # coordinator, Redis, trainer and its child, a member

    def told(self) -> dict[str, Any]:
        path = self.state / "stack.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def pids(self) -> dict[str, int]:
        return dict(self.told().get("processes", {}))

    def services(self) -> list[psutil.Process]:
        """Processes of the stack below watchdog and supervisor."""
        ours = {self.watchdog.pid, self.told().get("supervisor")}
        coordinator_and_redis = [p for p in psutil.process_iter(["cmdline", "cwd"]) if self._works_in_state(p)]
        found = {p.pid: p for p in (*alive(self.mark), *coordinator_and_redis) if p.pid not in ours}
        return [p for p in found.values() if runs(p)]

    def _works_in_state(self, process: psutil.Process) -> bool:
        """Redis calls itself by its socket, which may lie elsewhere, and works in its folder."""
        state = str(self.state)
        return state in " ".join(process.info["cmdline"] or []) or (process.info["cwd"] or "").startswith(state)

    def end(self) -> tuple[int, str]:
        """Status and console of the watchdog after it ended by itself."""
        _, console = self.watchdog.communicate(timeout=180)
        return self.watchdog.returncode, console

    def close(self) -> None:
        if self.watchdog.poll() is None:
            self.watchdog.terminate()
            self.watchdog.communicate(timeout=180)
        self._held.close()


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path / "state")
    try:
        running.wait_until_up()
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One stack for the tests that leave it whole."""
    running = Running(tmp_path_factory.mktemp("shared") / "state")
    try:
        running.wait_until_up()
        yield running
    finally:
        running.close()


def test_a_second_interrupt_does_not_wait(stack: Running) -> None:
    stack.watchdog.send_signal(signal.SIGINT)
    time.sleep(0.3)  # less than the trainer may take to stop
    stack.watchdog.send_signal(signal.SIGINT)
    status, console = stack.end()
    assert status == 1 and "the supervisor was ended by SIGKILL" in console
    assert stack.services() == []


@pytest.mark.parametrize("who", ["supervisor", "watchdog"])
def test_no_process_is_left_when_one_of_the_two_is_killed(stack: Running, who: str) -> None:
    victim = stack.told()["supervisor"] if who == "supervisor" else stack.watchdog.pid
    os.kill(victim, signal.SIGKILL)
    stack.watchdog.communicate(timeout=180)
    eventually(lambda: not stack.services())


def test_a_killed_coordinator_comes_back_with_what_it_knew(shared: Running) -> None:
    before = shared.pids()["coordinator"]
    os.kill(before, signal.SIGKILL)
    eventually(lambda: shared.pids().get("coordinator", before) != before)
    with Client(shared.told()["url"], patience_s=20) as client:
        assert client.jobs() == []
    trainer = shared.pids()["trainer"]
    assert psutil.pid_exists(trainer)
    redis = [p for p in shared.services() if "redis-server" in p.name()]
    eventually(lambda: len([p for p in shared.services() if "redis-server" in p.name()]) == 1)
    assert redis


def test_what_a_dead_service_left_behind_is_ended_before_it_starts_again(shared: Running) -> None:
    trainer = shared.pids()["trainer"]
    (child,) = [p for p in alive(shared.mark) if p.ppid() == trainer]
    os.kill(trainer, signal.SIGKILL)
    eventually(lambda: shared.pids().get("trainer", trainer) != trainer)
    assert not runs(child)


def test_a_drained_member_is_not_started_again_and_one_interrupt_takes_all_down_in_order(stack: Running) -> None:
    """A member that was killed is started again."""
    with Client(stack.told()["url"], patience_s=20) as client:
        eventually(lambda: client.fleet().replicas)
        killed = stack.pids()["rollout-0"]
        os.kill(killed, signal.SIGTERM)
        eventually(lambda: stack.pids().get("rollout-0", killed) != killed)
        eventually(lambda: [member.state for member in client.fleet().replicas] == ["idle"])
        (member,) = client.fleet().replicas
        assert client.drain(member.id).state == "draining"
        eventually(lambda: [member.state for member in client.fleet().replicas] == ["left"])
        eventually(lambda: "rollout-0" not in stack.pids())
    stack.watchdog.send_signal(signal.SIGINT)
    status, console = stack.end()
    assert status == 0 and "rollout-0 was drained and has left the fleet; it is not started again" in console
    assert console.count("it is started again") == 1
    assert "trainer did not stop within 1 s and is killed" in console
    assert "coordinator did not stop" not in console
    assert console.index("stopping.") < console.index("trainer did not stop") < console.index("stopped.")
    assert stack.services() == [] and stack.pids() == {}


def test_replicas_are_added_and_drained_while_the_stack_runs(shared: Running) -> None:
    """By `millrace scale` and by `millrace up --replicas`. What does not fit on the host changes nothing."""

    def command(*words: str) -> "subprocess.CompletedProcess[str]":
        return run_forked("millrace", *words, "--state", shared.state)

    def replicas() -> set[str]:
        return {name for name in shared.pids() if name.startswith("rollout-")}

    with Client(shared.told()["url"], patience_s=20) as client:

        def states() -> list[str]:
            return sorted(member.state for member in client.fleet().replicas if member.state != "left")

        eventually(lambda: states() == ["idle"])
        first = shared.pids()["rollout-0"]
        done = command("scale", "3")
        assert done.returncode == 0 and done.stdout.startswith("rollout-1, rollout-2:")
        eventually(lambda: states() == ["idle"] * 3)
        assert command("up", "--replicas", "1").returncode == 0
        eventually(lambda: states() == ["idle"] and replicas() == {"rollout-0"})
        assert command("scale", "1").stdout == "nothing to change.\n"
        assert command("up", "--replicas", "2").returncode == 0
        eventually(lambda: replicas() == {"rollout-0", "rollout-1"})
        refused = command("scale", "6")
        assert refused.returncode != 0 and "six GPUs" in refused.stderr
        refused = command("up", "--replicas", "3", "--ranks", "2")
        assert refused.returncode != 0 and "--ranks" in refused.stderr
        assert "--replicas to change" in command("up").stderr
        assert command("scale", "1").returncode == 0
        eventually(lambda: replicas() == {"rollout-0"})
        assert shared.pids()["rollout-0"] == first


def test_scale_without_a_stack_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidState, match="no stack runs"):
        scale(tmp_path, 2)


def test_a_member_that_stands_still_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_SILENT_S", "3")
    running = Running(tmp_path / "state")
    try:
        running.wait_until_up()
        with Client(running.told()["url"], patience_s=20) as client:
            eventually(lambda: [member.state for member in client.fleet().replicas] == ["idle"])
            stopped = running.pids()["rollout-0"]
            os.kill(stopped, signal.SIGSTOP)
            eventually(lambda: running.pids().get("rollout-0", stopped) != stopped)
            assert not psutil.pid_exists(stopped)
        running.watchdog.send_signal(signal.SIGINT)
        assert "rollout-0 has not sent a heartbeat for 3 s and is killed" in running.end()[1]
    finally:
        running.close()


def test_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path, 8):
        running = Running(tmp_path / "state")
        try:
            running.wait_until_up()
            trainer, told = running.pids()["trainer"], running.told()
            before = {p.pid for p in alive(running.mark)}
            file = filled(tmp_path)
            os.kill(trainer, signal.SIGKILL)
            eventually(lambda: {p.pid for p in alive(running.mark)} - before)
            file.unlink()
            eventually(lambda: running.pids().get("trainer", trainer) != trainer)
            assert Client(told["url"]).ready()
            running.watchdog.send_signal(signal.SIGINT)
            status, console = running.end()
        finally:
            running.close()
    assert status == 0, console
    assert "is full: log lines are lost" in console and "has room again." in console


def test_a_standby_takes_over(tmp_path: Path) -> None:
    """With the imports of the service's process; where it has died too, another process is started."""
    (tmp_path / "logs").mkdir()
    done = subprocess.run(
        (sys.executable, "-c", TAKING_OVER, str(tmp_path)), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_second_stack_on_the_same_folder_is_refused(shared: Running) -> None:
    with held_port() as http, held_port() as grpc:
        argv = supervising(shared.state, http, grpc, shared.mark)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "another stack runs on the state folder" in done.stderr
    assert "--state" in done.stderr
    assert Client(shared.told()["url"]).ready()


def test_a_taken_port_is_told_with_the_option(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        argv = supervising(tmp_path / "state", port, 0, "mark")
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert f"port {port} is not available" in done.stderr and "--http-port" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_service_that_keeps_dying_ends_the_stack_with_its_last_words(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from millrace.local import lives, supervisor\n"
        "from millrace.local.options import Service, StackOptions\n"
        "state, http, grpc = sys.argv[1:]\n"
        "supervisor.Restarts = lambda: lives.Restarts(limit=2, first_wait_s=0.1)\n"
        "options = StackOptions(state, http_port=int(http), grpc_port=int(grpc))\n"
        "coordinator = (sys.executable, '-m', 'services.coordinator', '--http-port', http, '--grpc-port', grpc,\n"
        "               '--state-dir', state + '/coordinator')\n"
        "dying = (sys.executable, '-c', 'raise SystemExit(\"no such model\")')\n"
        "services = [Service('coordinator', coordinator, {}, True, 10.0), Service('trainer', dying, {}, True, 1.0)]\n"
        "raise SystemExit(supervisor.supervise(options, services))\n"
    )
    with held_port() as http, held_port() as grpc:
        argv = (sys.executable, "-c", program, str(tmp_path / "state"), str(http), str(grpc))
        done = subprocess.run(argv, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1
    assert done.stderr.count("no such model") == 3
    assert "started again in 0.1 s (1 of 2 times)" in done.stderr
    assert "trainer keeps dying and the stack is of no use without it" in done.stderr
    assert "trainer.log" in done.stderr and "millrace doctor" in done.stderr

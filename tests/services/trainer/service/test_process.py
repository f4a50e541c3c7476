"""One trainer process: the fleet, draining, failing. Where it is about the start it is started by its command."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.contracts.v1 import fleet_pb2
from millrace.contracts.v1 import trainer_pb2 as pb
from tests.forked import Forked
from tests.services.trainer.coordinator import ScriptedCoordinator, coordinator
from tests.services.trainer.groups import job_spec, random_groups
from tests.services.trainer.process import TrainerProcess, trainer

pytestmark = pytest.mark.slow


def until(condition: Callable[[], object], running: TrainerProcess, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, running.text()
        time.sleep(0.05)


def test_registers_beats_and_drains_in_the_middle_of_a_step(
    served: ScriptedCoordinator, tied_model: Path, tmp_path: Path
) -> None:
    script = served.script
    with trainer(served, tmp_path / "log") as running:
        calls = running.calls()
        (member,) = script.members.values()
        assert member.kind == fleet_pb2.MEMBER_KIND_TRAINER and member.world_size == 1
        assert member.address == calls.address
        calls.configure(job_spec(tied_model))
        script.groups = random_groups(4, 4)
        calls.step(1, script.groups, served.address)
        until(lambda: script.beats and script.beats[-1].version == 1 and script.beats[-1].tokens > 0, running)
        until(lambda: script.beats[-1].usage.hosts and script.beats[-1].usage.hosts[0].process_bytes > 0, running)
        script.members.clear()
        until(lambda: script.registrations == 2, running)
        script.hold.clear()
        script.save_follows = True
        stepping = running.in_background(lambda: calls.step(2, script.groups, served.address))
        until(lambda: len(script.fetches) == 2, running)
        running.process.send_signal(signal.SIGTERM)
        try:
            until(lambda: script.drained == [member.member_id], running)
            assert running.process.poll() is None and not stepping.done()
        finally:
            script.hold.set()
        assert stepping.result(30).version == 2
        assert not script.left, "the coordinator has not asked for the checkpoint yet"
        assert calls.save(str(tmp_path / "step-2")).version == 2
        assert running.process.wait(30) == 0
        assert [(leave.member_id, leave.failed) for leave in script.left] == [(member.member_id, False)]
        assert script.left_open == [True], "it would be taken for dead"


def test_the_coordinator_asks_it_to_drain(served: ScriptedCoordinator, tmp_path: Path) -> None:
    with trainer(served, tmp_path / "log") as running:
        running.calls()
        served.script.drain = True
        assert running.process.wait(30) == 0
        assert len(served.script.left) == 1


def test_another_protocol_version_ends_it(served: ScriptedCoordinator, tmp_path: Path) -> None:
    served.script.refusal = "this trainer speaks protocol 1, the coordinator 2."
    with trainer(served, tmp_path / "log", by_command=True) as running:
        assert running.process.wait(60) == 1
        assert "the coordinator refuses this trainer: this trainer speaks protocol 1" in running.text()


def test_waits_for_a_coordinator_that_is_down(tmp_path: Path) -> None:
    with coordinator() as first:
        port = int(first.address.rsplit(":", 1)[1])
    with trainer(first, tmp_path / "log") as running:
        until(lambda: "waiting for the coordinator" in running.text(), running)
        with coordinator(first.script, port):
            until(lambda: first.script.registrations == 1, running)
            assert running.stop() == 0


def test_a_taken_port_is_told(served: ScriptedCoordinator, tmp_path: Path) -> None:
    port = served.address.rsplit(":", 1)[1]
    with trainer(served, tmp_path / "log", MILLRACE_PORT=port) as running:
        assert running.process.wait(60) == 1
        assert f"cannot listen on 127.0.0.1:{port}" in running.text() and "Traceback" not in running.text()


def test_an_address_for_all_needs_a_token(served: ScriptedCoordinator, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = Forked("services.trainer", ("--coordinator", served.address, "--host", "10.0.0.1"), os.environ, log)
    assert process.wait(60) == 1
    told = log.read_text()
    assert "no token is set, and other hosts can reach 0.0.0.0" in told and "Traceback" not in told


def test_a_bad_model_leaves_it_ready_for_a_good_one(
    served: ScriptedCoordinator, tied_model: Path, tmp_path: Path
) -> None:
    from millrace.errors import InvalidJob

    with trainer(served, tmp_path / "log") as running:
        calls = running.calls()
        for parts, words in (
            ({}, "no config.json"),
            ({"trainer": {"backend_options": {"attention": "flash_attention_2"}}}, "flash-attn is not installed"),
        ):
            folder = tied_model if parts else tmp_path / "no-such-model"
            try:
                calls.configure(job_spec(folder, **parts))
            except InvalidJob as error:
                assert words in error.what and error.fix
            else:
                raise AssertionError(f"accepted: {parts}")
            assert calls.status().state == pb.TRAINER_STATE_IDLE
        assert calls.configure(job_spec(tied_model)).parameters == 103040

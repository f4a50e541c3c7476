"""Sharded publications of a trainer of two ranks, over gRPC: what receivers and ranks that hang or die do to it."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from millrace.contracts.methods import TrainerRpc
from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.contracts.v1 import weights_pb2
from millrace.errors import MillraceError, PublicationFailed, Unavailable
from millrace.ids import new_member_id
from millrace.telemetry.metrics.declaration import Owner
from millrace.weights.phases import PublicationId
from millrace.weights.plans import wire_layouts
from millrace.weights.plans.manifest import Manifest
from millrace.weights.plans.memory import Memory
from millrace.weights.transfer.channels.rendezvous import Rendezvous
from millrace.weights.transfer.pipeline import ReceivePipeline
from millrace.weights.transfer.session import PublicationSession
from tests.deploy.expressions import without_data
from tests.forked import CONTEXT
from tests.layouts import whole_layout
from tests.services.trainer.backends.fsdp2.test_backend import saved_tensors
from tests.services.trainer.calls import Calls
from tests.services.trainer.coordinator import ScriptedCoordinator, coordinator
from tests.services.trainer.groups import job_spec
from tests.services.trainer.process import IMPATIENT, TrainerProcess, trainer
from tests.services.trainer.publication.receiver import reference
from tests.telemetry.metrics.pages import page_with, value

pytestmark = pytest.mark.slow

JOB = "job-1"
RANKS = 2
CALLED_OFF_S = 60.0
"""What has a shorter deadline, or is called off, is over by then; what is neither waits 20 s."""


class Worker:
    """One receiver that wants everything whole. It stays in its communicator from version to version."""

    def __init__(self, calls: Calls) -> None:
        self.calls, self.session, self.member = calls, PublicationSession(), new_member_id("rollout")
        told = calls.call(TrainerRpc.DescribeWeights, pb.DescribeSendRequest(job_id=JOB, dtype="bfloat16"))
        self.manifest = Manifest.from_proto(told.manifest)
        self.tensors = [torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in self.manifest.tensors]
        self.memory = Memory(self.manifest, whole_layout(self.manifest), self.tensors)
        wanted = wire_layouts.encode([self.memory.layout.boxes])
        self.layouts = weights_pb2.Sides(senders=told.layouts, receivers=wanted, message_bytes=32768)
        self.holding = threading.Event()
        self.failure: PublicationFailed | None = None

    def prepare(self, attempt: int, deadline_s: float = 120.0) -> pb.PrepareSendResponse:
        self.ref = reference(0, attempt=attempt)
        receiver = weights_pb2.Receiver(member_id=self.member, first_rank=RANKS, world_size=1)
        request = pb.PrepareSendRequest(
            publication=self.ref,
            path=weights_pb2.PATH_SHARDED,
            receivers=[receiver],
            dtype="bfloat16",
            deadline_s=deadline_s,
            sides=self.layouts,
        )
        self.prepared: pb.PrepareSendResponse = self.calls.call(TrainerRpc.PreparePublication, request)
        return self.prepared

    def start(self, *, hold: bool = False, deadline_s: float = 120.0) -> None:
        """Receives in a thread. With `hold` it comes and takes nothing."""
        plan = wire_layouts.Planner().plan(self.manifest, self.layouts)
        assert plan.hash == self.prepared.plan_hash
        at = self.prepared.rendezvous
        rendezvous = Rendezvous(at.host, at.port, at.key, RANKS, at.world_size, b"", torch.device("cpu"), deadline_s)
        receiving = ReceivePipeline(plan, RANKS, self.memory, staged=False)
        self.failure = None

        def held(channel: Any) -> Any:
            self.holding.set()
            while self.session._failure is None:
                time.sleep(0.02)

        def run() -> None:
            try:
                give_up = time.monotonic() + deadline_s
                self.got = self.session.run(
                    rendezvous, PublicationId.from_proto(self.ref).key, give_up, held if hold else receiving.run
                )
            except PublicationFailed as error:
                self.failure = error

        self.session.begin()
        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def join(self, within_s: float = 30.0) -> None:
        self.thread.join(within_s)
        assert not self.thread.is_alive()

    def publish(self, attempt: int, saved: dict[str, torch.Tensor]) -> None:
        """A whole publication; what arrived is compared with the model folder."""
        self.prepare(attempt)
        self.start()
        sent = self.calls.transfer(self.ref)
        self.join()
        assert self.failure is None, self.failure
        assert all(sent.checksums.values[content] == value for content, value in self.got.sums.items())
        self.calls.finish(self.ref)
        for info, tensor in zip(self.manifest.tensors, self.tensors, strict=True):
            assert torch.equal(tensor, saved[info.name].bfloat16()), info.name


def hold_until_killed(address: str, attempt: int, ready: Any) -> None:
    """A receiver as a process of its own, whose connections close when it dies."""
    worker = Worker(Calls(address))
    worker.prepare(attempt)
    ready.put(worker.ref.SerializeToString())
    worker.start(hold=True)
    worker.holding.wait(60)
    ready.put(b"")
    time.sleep(60)


@pytest.fixture(scope="module")
def fleet() -> Iterator[ScriptedCoordinator]:
    with coordinator() as served:
        yield served


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, untied_model: Path, fleet: ScriptedCoordinator
) -> Iterator[Calls]:
    log = tmp_path_factory.mktemp("shards") / "log"
    with trainer(fleet, log, ranks=RANKS) as processes:
        calls = processes.calls()
        calls.configure(job_spec(untied_model))
        yield calls


def test_a_communicator_stands_from_version_to_version(running: Calls, untied_model: Path) -> None:
    worker, saved = Worker(running), saved_tensors(untied_model)
    worker.publish(0, saved)
    assert not worker.prepared.rendezvous.standing
    for tensor in worker.tensors:
        tensor.zero_()
    worker.publish(1, saved)
    assert worker.prepared.rendezvous.standing


def test_rank_zero_serves_the_metrics_of_all_ranks(
    running: Calls, untied_model: Path, fleet: ScriptedCoordinator
) -> None:
    Worker(running).publish(5, saved_tensors(untied_model))
    (member,) = fleet.script.members.values()
    last = f'millrace_rank_resident_memory_bytes{{host="{member.host}",rank="{RANKS - 1}"}}'
    page = page_with(member.metrics_port, [last])
    assert without_data(page, Owner.TRAINER) == []
    assert f"\nmillrace_trainer_ranks {float(RANKS)}\n" in page
    labels = f'engine="torch",engine_release="{torch.__version__}",job_id="job-1",member="{member.member_id}"'
    assert f"\nmillrace_member_info{{{labels}}} 1.0\n" in page and "\nmillrace_member_version 0.0\n" in page
    assert 'millrace_member_publication_seconds_count{phase="wire"}' in page
    assert value(page, "millrace_member_publication_bytes_total") > 0
    assert value(page, 'millrace_grpc_seconds_count{code="OK",method="Trainer/TransferPublication"}') >= 1


def test_a_receiver_that_takes_nothing_is_called_off_or_runs_out_of_time(running: Calls, untied_model: Path) -> None:
    worker, saved = Worker(running), saved_tensors(untied_model)
    worker.prepare(10)
    worker.start(hold=True)
    failed: list[MillraceError] = []
    sending = threading.Thread(target=lambda: failed.append(_failure(lambda: running.transfer(worker.ref))))
    sending.start()
    assert worker.holding.wait(60)
    time.sleep(0.3)
    began = time.monotonic()
    running.finish(worker.ref, "r0 was lost while receiving")
    sending.join(90)
    worker.join()
    assert time.monotonic() - began < CALLED_OFF_S
    assert isinstance(failed[0], PublicationFailed) and worker.failure is not None
    worker.prepare(11, deadline_s=1.5)
    worker.start(hold=True, deadline_s=1.5)
    began = time.monotonic()
    assert "deadline" in str(_failure(lambda: running.transfer(worker.ref)))
    assert time.monotonic() - began < CALLED_OFF_S
    running.finish(worker.ref, "its deadline has passed")
    worker.join()
    worker.publish(12, saved)


def test_a_receiver_that_is_killed_fails_the_attempt_and_not_the_next(running: Calls, untied_model: Path) -> None:
    ready = CONTEXT.Queue()
    process = CONTEXT.Process(target=hold_until_killed, args=(running.address, 20, ready))
    process.start()
    ref = weights_pb2.PublicationRef.FromString(ready.get(timeout=60))
    failed: list[MillraceError] = []
    sending = threading.Thread(target=lambda: failed.append(_failure(lambda: running.transfer(ref))))
    sending.start()
    assert ready.get(timeout=30) == b""
    process.kill()
    began = time.monotonic()
    sending.join(90)
    assert time.monotonic() - began < CALLED_OFF_S and isinstance(failed[0], PublicationFailed)
    running.finish(ref, "r0 is gone")
    process.join()
    Worker(running).publish(21, saved_tensors(untied_model))


@pytest.mark.chaos
# a killed one: tests/e2e/test_publication_faults.py
@pytest.mark.parametrize("how", [pytest.param(signal.SIGKILL, marks=pytest.mark.matrix), signal.SIGSTOP])
def test_a_sender_rank_that_is_lost_ends_the_transfer_for_all(
    how: signal.Signals, served: ScriptedCoordinator, tied_model: Path, tmp_path: Path
) -> None:
    with trainer(served, tmp_path / "log", ranks=RANKS, **IMPATIENT) as processes:
        calls = processes.calls()
        calls.configure(job_spec(tied_model))
        worker = Worker(calls)
        worker.prepare(0, deadline_s=5.0)
        worker.start(hold=True, deadline_s=5.0)
        transferring = processes.in_background(lambda: calls.transfer(worker.ref))
        assert worker.holding.wait(60)
        lost: psutil.Process = _rank_one(processes)
        lost.send_signal(how)
        with pytest.raises(Unavailable, match="rank 1 on"):
            transferring.result(120)
        worker.join(60.0)
        assert worker.failure is not None
        if how == signal.SIGSTOP:
            lost.send_signal(signal.SIGCONT)
        assert processes.process.wait(60) != 0


def _rank_one(processes: TrainerProcess) -> psutil.Process:
    return processes.ranks()[1]


def _failure(work: Any) -> MillraceError:
    try:
        work()
    except MillraceError as error:
        return error
    raise AssertionError("nothing failed")

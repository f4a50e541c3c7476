"""Which call may come when: the Trainer service in front of scripted ranks."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from millrace.contracts.methods import TrainerRpc
from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.contracts.v1.trainer_pb2_grpc import add_TrainerServicer_to_server
from millrace.errors import (
    Fenced,
    InvalidJob,
    InvalidState,
    NonFinite,
    NotFound,
    OutOfMemory,
    PartialOutOfMemory,
    PartialStep,
    PublicationFailed,
    Unavailable,
)
from millrace.wire.server import Server
from services.trainer.publication.sender import Sender
from services.trainer.ranks.commands import RanksFailed
from services.trainer.service.servicer import TrainerService
from tests.services.trainer.calls import JOB, Calls
from tests.services.trainer.groups import job_spec, random_groups, refs
from tests.services.trainer.publication.receiver import reference
from tests.services.trainer.steps import parts_of


class Ranks:
    """Answers as ranks would; `gate` closed holds every call, `error` fails the next."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.aborted = threading.Event()
        self.outcome: Future[pb.FinishSaveResponse] = Future()
        """Outcome of a save, which continues after the call is answered."""

    def call(self, method: Any, request: Any, deadline_s: float) -> Any:
        self.requests.append(request)
        while not self.gate.wait(0.02):
            if self.aborted.is_set():
                self.aborted.clear()
                raise PublicationFailed("aborted.")
        error, self.error = self.error, None
        if error is not None:
            raise error
        if isinstance(request, pb.ConfigureTrainerRequest):
            return pb.ConfigureTrainerResponse(version=7 if request.checkpoint else 0, world_size=1, parameters=5)
        if isinstance(request, pb.StepRequest):
            return pb.StepResponse(version=request.step, metrics={"calls": len(self.requests)})
        if isinstance(request, pb.LoadRequest):
            return pb.LoadResponse(version=3)
        if isinstance(request, pb.SaveRequest):
            self.outcome = Future()
        return method.response()

    def count(self, kind: type[Any]) -> int:
        return sum(isinstance(request, kind) for request in self.requests)


class ScriptedSender(Sender):
    def __init__(self, ranks: Ranks) -> None:
        super().__init__(0, "trainer-1")
        self._ranks = ranks
        self.finished = 0

    def abort(self, reason: str) -> None:
        self._ranks.aborted.set()

    def finish(self, *, failed: bool) -> None:
        self.finished += 1


class Running:
    def __init__(self) -> None:
        self.ranks = Ranks()
        self.sender = ScriptedSender(self.ranks)
        self.failures: list[str] = []
        self.pool = ThreadPoolExecutor(8)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.calls = Calls(f"127.0.0.1:{self._run(self._start())}")

    async def _start(self) -> int:
        self.trainer = TrainerService(
            self.ranks, self.sender, self.ranks, member_id="trainer-1", world_size=1, on_failed=self.failures.append
        )
        services = {"millrace.v1.Trainer": lambda grpc: add_TrainerServicer_to_server(self.trainer, grpc)}
        self._server = Server(services, "127.0.0.1", 0)
        await self._server.start()
        return self._server.port

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def begin(self, call: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """A call in a thread; returns once the ranks have something to do."""
        future = self.pool.submit(call, *arguments)
        time.sleep(0.3)
        return future

    def drain(self, *, save_follows: bool = False) -> None:
        self._run(self.trainer.drain(save_follows=save_follows))

    def stop(self) -> None:
        self.ranks.gate.set()
        self._run(self._server.stop(0.1))
        self._loop.call_soon_threadsafe(self._loop.stop)


@contextmanager
def running() -> Iterator[Running]:
    server = Running()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def idle() -> Iterator[Running]:
    with running() as server:
        yield server


@pytest.fixture
def ready(idle: Running, tmp_path: Path) -> Running:
    idle.calls.configure(job_spec(tmp_path / "model"))
    return idle


GROUPS = random_groups(2, 2)


def test_before_configure_nothing_else_works(idle: Running) -> None:
    assert idle.calls.status().state == pb.TRAINER_STATE_IDLE and idle.calls.status().version == -1
    for call in (
        lambda: idle.calls.step(1, GROUPS, "nowhere:1"),
        lambda: idle.calls.begin_save("/somewhere"),
        lambda: idle.calls.load("/somewhere"),
        lambda: idle.calls.prepare(reference(0), 1, "float32"),
        lambda: idle.calls.transfer(reference(0)),
    ):
        with pytest.raises(Fenced, match="holds no job") as raised:
            call()
        assert "configure" in raised.value.fix
    assert not idle.ranks.requests


def test_configure_again_answers_what_is_loaded(ready: Running, tmp_path: Path) -> None:
    ready.calls.step(1, GROUPS, "nowhere:1")
    again = ready.calls.configure(job_spec(tmp_path / "model"))
    assert (again.version, again.world_size, again.parameters) == (1, 1, 5)
    assert ready.ranks.count(pb.ConfigureTrainerRequest) == 1
    assert ready.calls.configure(job_spec(tmp_path / "model"), checkpoint="/elsewhere").version == 7
    assert ready.calls.status().version == 7


def test_another_configuration_loads_anew_and_a_repeated_one_does_not(ready: Running, tmp_path: Path) -> None:
    ready.calls.step(1, GROUPS, "nowhere:1")
    for _ in range(2):
        again = ready.calls.configure(job_spec(tmp_path / "model"), configuration="second")
        assert again.version == 0 and ready.calls.status().configuration == "second"
    assert ready.ranks.count(pb.ConfigureTrainerRequest) == 2


@pytest.mark.parametrize("busy", ["step", "transfer", "describe"])
def test_a_job_is_loaded_once_the_ranks_are_free(busy: str, ready: Running, tmp_path: Path) -> None:
    """Whoever asked for what they do has gone. A transfer is ended, everything else is waited for."""
    ready.calls.prepare(reference(0), 1, "float32")
    ready.ranks.gate.clear()
    calls: dict[str, Callable[[], Any]] = {
        "step": lambda: ready.calls.step(1, GROUPS, "nowhere:1"),
        "transfer": lambda: ready.calls.transfer(reference(0)),
        "describe": lambda: ready.calls.call(
            TrainerRpc.DescribeWeights, pb.DescribeSendRequest(job_id=JOB, dtype="float32")
        ),
    }
    under_way = ready.begin(calls[busy])
    loading = ready.begin(lambda: ready.calls.configure(job_spec(tmp_path / "model"), job="job-2"))
    assert ready.ranks.count(pb.ConfigureTrainerRequest) == (2 if busy == "transfer" else 1)
    ready.ranks.gate.set()
    assert loading.result(60).parameters == 5 and ready.calls.status().job_id == "job-2"
    with pytest.raises(PublicationFailed) if busy == "transfer" else nullcontext():
        under_way.result(60)


def test_a_bad_spec_is_told_field_by_field(idle: Running) -> None:
    request = pb.ConfigureTrainerRequest(job_id=JOB, spec=json.dumps({"name": "x", "trainer": {"tokens": 3}}))
    with pytest.raises(InvalidJob, match=r"trainer\.tokens"):
        idle.calls.call(TrainerRpc.Configure, request)
    with pytest.raises(InvalidJob, match="not JSON"):
        idle.calls.call(TrainerRpc.Configure, pb.ConfigureTrainerRequest(job_id=JOB, spec="{"))
    assert not idle.ranks.requests


def test_a_step_is_made_once(ready: Running) -> None:
    first = ready.calls.step(1, GROUPS, "nowhere:1")
    assert ready.calls.step(1, GROUPS, "nowhere:1") == first
    assert ready.ranks.count(pb.StepRequest) == 1
    for number in (0, 3):
        with pytest.raises(Fenced, match=f"step {number} .* version 1"):
            ready.calls.step(number, GROUPS, "nowhere:1")
    ready.calls.step(2, GROUPS, "nowhere:1")
    with pytest.raises(Fenced):
        ready.calls.step(1, GROUPS, "nowhere:1")


def parts(step: int, budget: int = 0) -> list[pb.StepRequest]:
    request = pb.StepRequest(
        job_id=JOB, step=step, groups=refs(GROUPS), work_address="nowhere:1", token_budget=budget, step_groups=2
    )
    return parts_of(request, [1, 1])


def test_a_part_is_added_once_and_the_step_that_ends_it_follows_it(ready: Running) -> None:
    first, last = parts(1)
    for traceparent in ("", "00-" + "1" * 32 + "-" + "2" * 16 + "-01"):
        first.traceparent = traceparent  # another span asks again
        ready.calls.add(first)
    assert ready.ranks.count(pb.AddPartRequest) == 1 and ready.calls.status().version == 0
    answer = ready.calls.call(TrainerRpc.Step, last)
    assert answer.version == 1 and ready.calls.call(TrainerRpc.Step, last) == answer
    assert ready.ranks.count(pb.StepRequest) == 1
    assert ready.trainer.trained_tokens == sum(sum(ref.response_tokens) for ref in refs(GROUPS))
    ready.calls.add(first)
    assert ready.ranks.count(pb.AddPartRequest) == 1, "the step has it"


def test_parts_follow_each_other_and_the_first_begins_anew(ready: Running) -> None:
    first, last = parts(1)
    for too_early in (lambda: ready.calls.call(TrainerRpc.Step, last), lambda: ready.calls.add(last)):
        with pytest.raises(Fenced, match="part 1 of step 1 is not the next: the trainer has 0"):
            too_early()
    with pytest.raises(Fenced, match=r"step 2 .* version 0"):
        ready.calls.add(parts(2)[0])
    ready.calls.add(first)
    ready.calls.add(parts(1, budget=64)[0])
    assert ready.ranks.count(pb.AddPartRequest) == 2, "another token budget is another part"
    ready.calls.call(TrainerRpc.Step, parts(1, budget=64)[1])


@pytest.mark.parametrize("failing", ["part", "step", "load"])
def test_after_a_failure_or_a_load_the_step_has_no_parts(failing: str, ready: Running) -> None:
    first, last = parts(1)
    ready.calls.add(first)
    if failing == "load":
        ready.calls.load("/somewhere")  # version 3
        first, last = parts(4)
    else:
        ready.ranks.error = NonFinite("rewards: nan.", "look at it.")
        with pytest.raises(NonFinite):
            if failing == "part":
                ready.calls.add(last)
            else:
                ready.calls.call(TrainerRpc.Step, last)
    with pytest.raises(Fenced, match="the trainer has 0"):
        ready.calls.call(TrainerRpc.Step, last)
    ready.calls.add(first)
    assert ready.calls.call(TrainerRpc.Step, last).version == first.step


def test_weights_are_published_and_saved_between_parts(ready: Running) -> None:
    first, last = parts(1)
    ready.calls.add(first)
    ready.calls.prepare(reference(0), 1, "float32")
    ready.calls.transfer(reference(0))
    ready.calls.begin_save("/somewhere")
    assert ready.calls.call(TrainerRpc.Step, last).version == 1


def test_asked_again_it_joins_the_part_in_progress(ready: Running) -> None:
    """As a coordinator does that died meanwhile. The step that follows the part waits for it."""
    first, last = parts(1)
    ready.ranks.gate.clear()
    callers = [ready.begin(ready.calls.add, first) for _ in range(2)]
    step = ready.begin(ready.calls.call, TrainerRpc.Step, last)
    assert ready.calls.status().state == pb.TRAINER_STATE_STEPPING
    ready.ranks.gate.set()
    for caller in callers:
        caller.result(60)
    assert step.result(60).version == 1 and ready.ranks.count(pb.AddPartRequest) == 1


@pytest.mark.parametrize("busy", ["second part", "step", "transfer"])
def test_a_coordinator_that_died_may_add_all_parts_again(busy: str, ready: Running) -> None:
    """Whatever the ranks work on for it."""
    first, last = parts(1)
    ready.calls.add(first)
    ready.calls.prepare(reference(0), 1, "float32")
    ready.ranks.gate.clear()
    second = parts_of(pb.StepRequest(job_id=JOB, step=1, groups=refs(GROUPS)[1:], work_address="nowhere:1"), [1])[0]
    second.part = 1
    calls: dict[str, Callable[[], Any]] = {
        "second part": lambda: ready.calls.add(second),
        "step": lambda: ready.calls.call(TrainerRpc.Step, last),
        "transfer": lambda: ready.calls.transfer(reference(0)),
    }
    under_way = ready.begin(calls[busy])
    again = ready.begin(ready.calls.add, first)
    ready.ranks.gate.set()
    again.result(60)
    under_way.result(60)
    assert ready.ranks.count(pb.AddPartRequest) == (2 if busy == "second part" else 1)
    last.part = len(ready.trainer._job.parts) if ready.trainer._job else 0
    assert ready.calls.call(TrainerRpc.Step, last).version == 1


def test_asked_again_it_joins_the_step_in_progress(ready: Running) -> None:
    ready.ranks.gate.clear()
    callers = [ready.begin(ready.calls.step, 1, GROUPS, "nowhere:1") for _ in range(3)]
    assert ready.calls.status().state == pb.TRAINER_STATE_STEPPING
    ready.ranks.gate.set()
    assert len({caller.result(60).metrics["calls"] for caller in callers}) == 1
    assert ready.ranks.count(pb.StepRequest) == 1


def test_a_caller_that_goes_away_does_not_end_the_step(ready: Running) -> None:
    ready.ranks.gate.clear()
    hasty = Calls(ready.calls.address, {"Trainer/Step": 0.3})
    with pytest.raises(Unavailable, match="did not answer"):
        hasty.step(1, GROUPS, "nowhere:1")
    assert ready.calls.status().state == pb.TRAINER_STATE_STEPPING
    later = ready.begin(ready.calls.step, 1, GROUPS, "nowhere:1")
    ready.ranks.gate.set()
    assert later.result(60).version == 1
    assert ready.ranks.count(pb.StepRequest) == 1


def test_a_failed_step_leaves_the_version_and_can_be_asked_again(ready: Running) -> None:
    ready.ranks.error = NonFinite("rewards: nan of prompt 0-1, sample 2.", "look at it.")
    with pytest.raises(NonFinite, match="prompt 0-1, sample 2"):
        ready.calls.step(1, GROUPS, "nowhere:1")
    assert ready.calls.status().version == 0 and ready.calls.status().state == pb.TRAINER_STATE_READY
    assert ready.calls.step(1, GROUPS, "nowhere:1").version == 1


def test_a_partial_step_costs_the_weights(ready: Running, tmp_path: Path) -> None:
    """Nobody publishes or saves them, and who asks finds a trainer that has to be configured."""
    ready.ranks.error = PartialStep("gradients of the policy: their norm is nan.", "look at it.")
    with pytest.raises(PartialStep, match="their norm is nan"):
        ready.calls.step(1, GROUPS, "nowhere:1")
    status = ready.calls.status()
    assert (status.job_id, status.version, status.state) == ("", -1, pb.TRAINER_STATE_IDLE)
    for call in (lambda: ready.calls.begin_save("/here"), lambda: ready.calls.prepare(reference(0), 1, "float32")):
        with pytest.raises(Fenced, match="holds no job"):
            call()
    assert ready.calls.configure(job_spec(tmp_path / "model"), checkpoint="/saved").version == 7
    assert ready.calls.step(8, GROUPS, "nowhere:1").version == 8


def test_busy_ranks_refuse_other_work(ready: Running) -> None:
    ready.ranks.gate.clear()
    saving = ready.begin(ready.calls.begin_save, "/here")
    assert ready.calls.status().state == pb.TRAINER_STATE_SAVING
    with pytest.raises(InvalidState, match="busy with Save"):
        ready.calls.step(1, GROUPS, "nowhere:1")
    again = ready.begin(ready.calls.begin_save, "/here")
    ready.ranks.gate.set()
    saving.result(60), again.result(60)
    assert ready.ranks.count(pb.SaveRequest) == 1


def test_a_checkpoint_is_there_when_finish_says_so(ready: Running) -> None:
    with pytest.raises(NotFound, match="trainer-1 began no checkpoint at /here"):
        ready.calls.finish_save("/here")
    ready.calls.begin_save("/here")
    ready.calls.begin_save("/here")
    assert ready.ranks.count(pb.SaveRequest) == 1
    finishing = [ready.begin(ready.calls.finish_save, "/here") for _ in range(2)]
    assert ready.calls.step(1, GROUPS, "nowhere:1").version == 1
    following = ready.begin(ready.calls.begin_save, "/there")
    assert ready.ranks.count(pb.SaveRequest) == 1 and not any(call.done() for call in finishing)
    ready.ranks.outcome.set_result(pb.FinishSaveResponse(version=0, bytes=7))
    assert [call.result(60).bytes for call in finishing] == [7, 7]
    following.result(60)
    assert ready.ranks.count(pb.SaveRequest) == 2


def test_a_save_that_failed_is_told_and_can_be_asked_for_again(ready: Running) -> None:
    ready.calls.begin_save("/here")
    ready.ranks.outcome.set_exception(InvalidState("rank 1 on node-b (pid 7): No space left on device."))
    for _ in range(2):
        with pytest.raises(InvalidState, match="rank 1 on node-b"):
            ready.calls.finish_save("/here")
    ready.calls.begin_save("/here")
    ready.ranks.outcome.set_result(pb.FinishSaveResponse())
    ready.calls.finish_save("/here")
    assert ready.ranks.count(pb.SaveRequest) == 2


@pytest.mark.parametrize("what", ["load", "configure", "drain"])
def test_who_needs_the_ranks_otherwise_waits_for_a_save(ready: Running, what: str, tmp_path: Path) -> None:
    ready.calls.begin_save("/here")
    calls = {
        "load": lambda: ready.calls.load("/there"),
        "configure": lambda: ready.calls.configure(job_spec(tmp_path / "model"), job="job-2"),
        "drain": ready.drain,
    }
    waiting = ready.begin(calls[what])
    assert not waiting.done() and len(ready.ranks.requests) == 2
    ready.ranks.outcome.set_exception(InvalidState("no space left on device."))
    waiting.result(60)


def test_another_job_is_refused_by_name(ready: Running) -> None:
    with pytest.raises(Fenced, match="the trainer holds job-1, not job-2"):
        ready.calls.step(1, GROUPS, "nowhere:1", job="job-2")


def test_load_moves_the_version(ready: Running) -> None:
    assert ready.calls.load("/there").version == 3
    assert ready.calls.step(4, GROUPS, "nowhere:1").version == 4
    ready.ranks.error = InvalidState("it is damaged.")
    with pytest.raises(InvalidState):
        ready.calls.load("/there")
    assert ready.calls.status().state == pb.TRAINER_STATE_IDLE


def test_lost_ranks_fail_the_trainer(ready: Running) -> None:
    ready.ranks.error = RanksFailed("Step failed: rank 1 on node-b (pid 7): silent for 16 s.")
    with pytest.raises(Unavailable, match="rank 1 on node-b"):
        ready.calls.step(1, GROUPS, "nowhere:1")
    status = ready.calls.status()
    assert status.state == pb.TRAINER_STATE_FAILED and "rank 1 on node-b" in status.failure
    assert ready.failures == [status.failure]
    with pytest.raises(Unavailable, match=r"Step cannot begin: .*rank 1 on node-b"):
        ready.calls.step(1, GROUPS, "nowhere:1")


def test_of_several_ranks_one_without_memory_fails_the_trainer_and_the_caller_is_told_why(ready: Running) -> None:
    ready.ranks.error = RanksFailed("Step failed: rank 1 ran out of memory.")
    ready.ranks.error.cause = OutOfMemory("rank 1 ran out of memory.", "set trainer.token_budget: 64.")
    with pytest.raises(OutOfMemory, match="rank 1 ran out of memory") as raised:
        ready.calls.step(1, GROUPS, "nowhere:1")
    assert raised.value.fix == "set trainer.token_budget: 64."
    assert ready.calls.status().state == pb.TRAINER_STATE_FAILED and len(ready.failures) == 1


@pytest.mark.parametrize("kind", [OutOfMemory, PartialOutOfMemory])
def test_a_single_rank_without_memory_keeps_the_job_unless_it_gave_it_up(
    kind: type[OutOfMemory], ready: Running
) -> None:
    ready.ranks.error = kind("rank 0 ran out of memory.")
    with pytest.raises(kind):
        ready.calls.step(1, GROUPS, "nowhere:1")
    status = ready.calls.status()
    assert status.job_id == ("" if kind is PartialOutOfMemory else JOB) and not ready.failures
    if kind is OutOfMemory:
        assert ready.calls.step(1, GROUPS, "nowhere:1").version == 1


def test_draining_finishes_the_step_and_takes_nothing_new(ready: Running) -> None:
    ready.ranks.gate.clear()
    stepping = ready.begin(ready.calls.step, 1, GROUPS, "nowhere:1")
    draining = ready.begin(ready.drain)
    with pytest.raises(Unavailable, match="draining"):
        ready.calls.begin_save("/here")
    assert not draining.done()
    ready.ranks.gate.set()
    draining.result(60)
    assert stepping.result(60).version == 1


def test_publication_phases_repeat_and_follow(ready: Running) -> None:
    ref, calls = reference(0), ready.calls
    with pytest.raises(InvalidState, match="never prepared"):
        calls.transfer(ref)
    assert calls.prepare(ref, 1, "float32") == calls.prepare(ref, 1, "float32")
    assert calls.transfer(ref) == calls.transfer(ref)
    assert ready.ranks.count(pb.PrepareSendRequest) == ready.ranks.count(pb.TransferSendRequest) == 1
    calls.finish(ref)
    calls.finish(ref)
    calls.prepare(reference(0, epoch=2), 1, "float32")
    with pytest.raises(Fenced, match="older"):
        calls.prepare(ref, 1, "float32")


def test_a_step_may_follow_a_transfer_that_is_not_finished(ready: Running) -> None:
    ready.calls.prepare(reference(0), 1, "float32")
    ready.calls.transfer(reference(0))
    assert ready.calls.step(1, GROUPS, "nowhere:1").version == 1
    ready.calls.finish(reference(0))


def test_a_failed_transfer_fails_its_publication_only(ready: Running) -> None:
    ready.calls.prepare(reference(0), 1, "float32")
    ready.ranks.error = PublicationFailed("lm_head.weight could not be sent.")
    with pytest.raises(PublicationFailed, match="could not be sent"):
        ready.calls.transfer(reference(0))
    assert ready.calls.status().state == pb.TRAINER_STATE_READY
    with pytest.raises(InvalidState, match="is in phase none"):
        ready.calls.transfer(reference(0))
    ready.calls.finish(reference(0), failure="a receiver died")
    ready.calls.prepare(reference(0, attempt=1), 1, "float32")
    ready.calls.transfer(reference(0, attempt=1))


@pytest.mark.parametrize("how", ["finish", "newer"])
def test_a_transfer_in_progress_gives_way(ready: Running, how: str) -> None:
    ready.calls.prepare(reference(0), 1, "float32")
    ready.ranks.gate.clear()
    transferring = ready.begin(ready.calls.transfer, reference(0))
    assert ready.calls.status().state == pb.TRAINER_STATE_PUBLISHING
    if how == "finish":
        ready.calls.finish(reference(0), failure="a receiver died")
        assert ready.sender.finished == 1
    else:
        newer = ready.begin(ready.calls.prepare, reference(0, attempt=1), 1, "float32")
    with pytest.raises(PublicationFailed):
        transferring.result(60)
    ready.ranks.gate.set()
    if how == "newer":
        newer.result(60)
        ready.calls.transfer(reference(0, attempt=1))

"""Commands over a real store, with ranks as threads: how answers and failures come back."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from millrace.contracts.methods import TrainerRpc
from millrace.contracts.v1 import trainer_pb2 as pb
from millrace.errors import NonFinite, OutOfMemory
from millrace.wire.membership import DRAINED_FILE, NOTICE_FILE
from services.trainer.ranks import commands, heartbeats
from services.trainer.ranks.commands import CommandLoop, CommandSender, Handler, RanksFailed
from services.trainer.ranks.heartbeats import Heartbeats
from services.trainer.ranks.world import World

pytestmark = pytest.mark.slow

SILENT_S = 1.0
Action = Callable[[pb.StepRequest], pb.StepResponse]


class Ranks:
    """Two ranks as threads, each with its own action for a Step."""

    def __init__(self, *actions: Action) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.worlds = [
            World(rank, len(actions), f"node-{rank}", torch.device("cpu"), ("127.0.0.1", store.port), store)
            for rank in range(len(actions))
        ]
        self.heartbeats = [Heartbeats(world, SILENT_S) for world in self.worlds]
        self.drains: list[int] = []
        for rank, own in enumerate(self.heartbeats):
            own.start(on_drain=partial(self.drains.append, rank))
        self.commands = CommandSender(self.worlds[0], self.heartbeats[0])
        self._threads = []
        for world, action in zip(self.worlds, actions, strict=True):
            loop = CommandLoop(world, [Handler.of(TrainerRpc.Step, action)])
            self._threads.append(threading.Thread(target=loop.run, daemon=True))
            self._threads[-1].start()
        while len(self.heartbeats[0]._hosts) < len(actions):
            time.sleep(0.01)

    def step(self, deadline_s: float = 20.0) -> pb.StepResponse:
        return self.commands.call(TrainerRpc.Step, pb.StepRequest(step=3), deadline_s)

    def stop(self) -> None:
        self.commands.stop()
        for thread in self._threads:
            thread.join(60)
        for own in reversed(self.heartbeats):
            own.stop()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("EVERY_S", 0.05), ("LEAVE_S", 0.2)):
        monkeypatch.setattr(heartbeats, name, seconds)
    for name, seconds in (("POLL_S", 0.1), ("STRAGGLE_S", 0.5)):
        monkeypatch.setattr(commands, name, seconds)


@pytest.fixture
def started() -> Iterator[Callable[..., Ranks]]:
    """Starts ranks with the given actions; tells them to stop at the end."""
    all_ranks: list[Ranks] = []
    over.clear()

    def start(*actions: Action) -> Ranks:
        all_ranks.append(Ranks(*actions))
        return all_ranks[-1]

    yield start
    over.set()
    for ranks in all_ranks:
        ranks.stop()


def answer(request: pb.StepRequest) -> pb.StepResponse:
    return pb.StepResponse(version=request.step, metrics={"x": 0.5})


over = threading.Event()
"""Set when a test is over: ranks that are stuck go on."""


def stuck(request: pb.StepRequest) -> pb.StepResponse:
    over.wait(120.0)
    return answer(request)


def not_finite(request: pb.StepRequest) -> pb.StepResponse:
    raise NonFinite("rewards: nan of prompt 0-1, sample 2.", "look at it.")


def crashing(request: pb.StepRequest) -> pb.StepResponse:
    raise MemoryError("out of memory")


def test_rank_0_answers_for_all(started: Any) -> None:
    ranks = started(answer, answer)
    for _ in range(3):
        assert ranks.step() == pb.StepResponse(version=3, metrics={"x": 0.5})


def test_an_error_that_all_have_is_raised_as_it_was(started: Any) -> None:
    ranks = started(not_finite, not_finite)
    with pytest.raises(NonFinite, match="prompt 0-1, sample 2") as raised:
        ranks.step()
    assert raised.value.fix == "look at it."


def test_an_error_of_one_while_the_other_is_done(started: Any) -> None:
    with pytest.raises(NonFinite):
        started(answer, not_finite).step()


def test_an_exception_names_rank_host_and_place(started: Any) -> None:
    with pytest.raises(RanksFailed, match=r"rank 1 on node-1 \(pid \d+\): MemoryError: out of memory \(.*:\d+\)"):
        started(answer, crashing).step()


def test_a_rank_past_the_deadline_is_named(started: Any) -> None:
    ranks = started(answer, stuck)
    began = time.monotonic()
    with pytest.raises(RanksFailed, match=r"Step failed: rank 1 on node-1 .*within 1 s, which the job's deadlines"):
        ranks.step(deadline_s=1.0)
    assert time.monotonic() - began < 60.0


def test_who_waits_for_a_broken_rank_is_given_up_soon(started: Any) -> None:
    with pytest.raises(RanksFailed, match=r"rank 0 .*did not finish in time; rank 1 .*MemoryError"):
        started(stuck, crashing).step(deadline_s=60.0)


def test_a_silent_rank_is_dead_long_before_the_deadline(started: Any) -> None:
    ranks = started(answer, stuck)
    ranks.heartbeats[1]._stopped.set()
    began = time.monotonic()
    with pytest.raises(RanksFailed, match=r"rank 1 on node-1 .*silent for \d+ s"):
        ranks.step(deadline_s=120.0)
    assert time.monotonic() - began < 60.0


def test_any_rank_may_ask_to_drain(started: Any) -> None:
    ranks = started(answer, answer)
    ranks.heartbeats[1].drain()
    end = time.monotonic() + 60
    while not ranks.drains and time.monotonic() < end:
        time.sleep(0.02)
    assert ranks.drains == [0]


def test_a_rank_whose_host_goes_away_drains_the_trainer(
    started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notice, noted = tmp_path / "notice", tmp_path / "drained"
    monkeypatch.setenv(NOTICE_FILE, str(notice))
    monkeypatch.setenv(DRAINED_FILE, str(noted))
    ranks = started(answer, answer)
    assert ranks.drains == [] and not noted.exists()
    notice.touch()
    end = time.monotonic() + 60
    while not ranks.drains and time.monotonic() < end:
        time.sleep(0.02)
    assert ranks.drains == [0] and noted.exists()


def test_one_rank_without_memory_ends_the_wait_for_the_others_at_once(
    started: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are in the middle of a pass, and wait for that rank."""
    released = threading.Event()

    def waits(request: pb.StepRequest) -> pb.StepResponse:
        released.wait(120)
        return pb.StepResponse()

    def exhausted(request: pb.StepRequest) -> pb.StepResponse:
        raise OutOfMemory("rank 1 ran out of memory in the policy's update.", "set trainer.token_budget: 64.")

    monkeypatch.setattr(commands, "STRAGGLE_S", 60.0)
    ranks = started(waits, exhausted)
    began = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 1 ran out of memory") as raised:
        ranks.step(deadline_s=120.0)
    released.set()
    assert time.monotonic() - began < commands.STRAGGLE_S
    assert isinstance(raised.value.cause, OutOfMemory) and raised.value.cause.fix == "set trainer.token_budget: 64."

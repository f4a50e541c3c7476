"""A publication that is put in place as it comes, and what comes between: an abort, an end, a request."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from millrace.contracts.v1 import weights_pb2
from millrace.errors import InvalidState, PublicationFailed
from millrace.ids import MemberId, Version
from millrace.weights.phases import Phase, PublicationId, PublicationState
from millrace.weights.plans.manifest import Manifest
from services.rollout.engine import Completion, EngineDied, Response, Sampling, StopReason
from services.rollout.engines.transformers.decoding import DecodeLoop, Request
from services.rollout.engines.transformers.engine import TransformersEngine
from services.rollout.engines.versioned import Incoming, VersionedEngine
from services.rollout.weights.receiver import PublicationReceiver
from services.rollout.weights.transfer_request import TransferRequest
from services.rollout.weights.worker_methods import Placed, Prepared, WorkerMethods
from services.rollout.weights.worker_rpc import InProcessWorker

INPLACE = weights_pb2.COMMIT_MODE_INPLACE
PUBLICATION = PublicationId("job-test", Version(2), 1, 1)  # type: ignore[arg-type]
REQUEST = TransferRequest(
    "job-test/2/1/1", Version(2), Manifest(()), "127.0.0.1", 1, 2, 1, 5.0, weights_pb2.PATH_SHARDED, mode=INPLACE
)
LIMIT_S = 10.0


class SlowLoop(DecodeLoop):
    """A loop whose token ends when the test says so."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(device="cpu"), SimpleNamespace(), 4, 1)  # type: ignore[arg-type]
        self.inside, self.may_end = threading.Event(), threading.Event()
        self.tokens, self.failing = 0, False

    def _token(self) -> None:
        with self._wake:
            self._running, self._waiting = [*self._running, *self._waiting], []
        self.inside.set()
        self.may_end.wait()
        self.tokens += 1
        if self.failing:
            raise RuntimeError("CUDA out of memory")

    def _keep(self, rows: list[int]) -> None:
        self._running = [self._running[row] for row in rows]


class Receiver:
    """The part of a WeightReceiver that these publications use."""

    def __init__(self) -> None:
        self.begun = False
        self.inside, self.may_end = threading.Event(), threading.Event()

    def begin(self) -> None:
        self.begun = True

    def place(self) -> Placed:
        self.inside.set()
        self.may_end.wait()
        return Placed(apply_s=0.0, compare_s=0.0, loader_tensors=0)

    def abort(self) -> None: ...

    def close(self) -> None: ...


@asynccontextmanager
async def decoding(*, shadow: bool = False) -> AsyncIterator[tuple[Any, SlowLoop, list[Completion | None]]]:
    """The engine in the middle of a token of version 1, with a transfer prepared; samples that ended."""
    engine: Any = TransformersEngine()
    loop, ended = SlowLoop(), list[Completion | None]()
    engine._decode_loop, engine._receiver, engine._model = loop, Receiver(), SimpleNamespace()
    engine._workers = InProcessWorker(engine._receiver)
    engine._thread.start(loop)
    try:
        pause = loop.pause()
        await asyncio.to_thread(loop.wait_paused, pause)
        loop.set_version(Version(1))
        loop.resume(pause)
        loop.submit(Request([1], Sampling(5), ended.append))
        await asyncio.to_thread(loop.inside.wait, LIMIT_S)
        engine._version, engine._incoming = Version(1), Incoming(REQUEST, shadow)
        yield engine, loop, ended
    finally:
        loop.may_end.set()
        engine._receiver.may_end.set()
        for pause in list(loop._pauses):
            loop.resume(pause)
        await engine.stop()


def publication_receiver(engine: Any, served: list[Version | None]) -> Any:
    """A receiver that has prepared PUBLICATION."""
    made: Any = PublicationReceiver(engine, MemberId("m"), "keep", served.append)
    made._state = PublicationState(PUBLICATION, Phase.PREPARE)
    return made


def test_an_abort_before_the_engine_stands_still_leaves_what_is_served() -> None:
    async def scenario() -> None:
        async with decoding() as (engine, loop, ended):
            served: list[Version | None] = []
            receiving = publication_receiver(engine, served)
            transferring = asyncio.create_task(receiving.transfer(PUBLICATION))
            await asyncio.sleep(0.1)
            aborting = asyncio.create_task(receiving.abort(PUBLICATION, "another replica failed"))
            await asyncio.sleep(0.1)
            loop.may_end.set()
            await asyncio.wait_for(aborting, LIMIT_S)
            with pytest.raises(PublicationFailed, match="was aborted"):
                await asyncio.wait_for(transferring, LIMIT_S)
            tokens = loop.tokens
            await asyncio.sleep(0.05)
            assert loop.tokens > tokens, "it goes on"
            assert (served, ended, engine._receiver.begun) == ([], [], False)

    asyncio.run(scenario())


def test_an_abort_during_a_commit_does_not_end_its_pause() -> None:
    async def scenario() -> None:
        async with decoding() as (engine, loop, _):
            loop.may_end.set()
            await asyncio.wait_for(engine.begin_receive(), LIMIT_S)
            committing = asyncio.create_task(engine.commit(Version(2), "keep"))
            await asyncio.to_thread(engine._receiver.inside.wait, LIMIT_S)
            await engine.abort_receive()
            tokens = loop.tokens
            await asyncio.sleep(0.1)
            assert loop.tokens == tokens, "it decodes while weights are written"
            engine._receiver.may_end.set()
            await asyncio.wait_for(committing, LIMIT_S)
            await asyncio.sleep(0.1)
            assert loop.tokens > tokens
            await asyncio.wait_for(asyncio.to_thread(loop.wait_paused, loop.pause()), LIMIT_S)
            tokens = loop.tokens
            await asyncio.sleep(0.1)
            assert loop.tokens == tokens

    asyncio.run(scenario())


@pytest.mark.parametrize("phase", ["transfer", "commit"])
@pytest.mark.parametrize("end", ["fails", "is stopped"])
def test_a_loop_that_ends_during_a_pause_is_told(phase: str, end: str) -> None:
    async def scenario() -> None:
        async with decoding(shadow=phase == "commit") as (engine, loop, _):
            pausing = asyncio.create_task(
                engine.begin_receive() if phase == "transfer" else engine.commit(Version(2), "keep")
            )
            await asyncio.sleep(0.1)
            loop.failing = end == "fails"
            if end == "is stopped":
                loop.stop()
            loop.may_end.set()
            with pytest.raises(EngineDied, match="the decode loop ended"):
                await asyncio.wait_for(pausing, LIMIT_S)

    asyncio.run(scenario())


class FakeWorkers:
    """Workers that do what they are told."""

    def __init__(self) -> None:
        self.may_place = asyncio.Event()
        self.failing = False

    async def ask(self, method: Callable[..., Any], *arguments: Any, paused: bool = False) -> list[Any]:
        if method is WorkerMethods.prepare:
            return [Prepared(shadow_fits=False, inplace_possible=True)]
        if method is WorkerMethods.place:
            await self.may_place.wait()
            if self.failing:
                raise PublicationFailed("a worker failed.")
            return [Placed(apply_s=0.0, compare_s=0.0, loader_tensors=0)]
        return [None]


class FakeEngine(VersionedEngine):
    """An engine whose pause takes until the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self._workers = self.workers = FakeWorkers()
        self.may_pause = asyncio.Event()
        self.may_sample = asyncio.Event()
        self.paused = False
        self.begun: list[str] = []
        self._version = Version(1)

    async def _generate(self, prompt_tokens: Sequence[int], sampling: Sampling, response: Response) -> Completion:
        self.begun.append(self._cache_key)
        await self.may_sample.wait()
        return Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), (), StopReason.LENGTH, "")

    def _started(self) -> bool:
        return True

    async def _pause(self, cache_policy: str) -> None:
        await self.may_pause.wait()
        self.paused = True

    async def _resume(self) -> None:
        self.paused = False

    async def _label(self, version: Version, cache_key: str) -> None: ...

    async def _end_requests(self) -> None: ...


def test_workers_paused_after_an_abort_go_on() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        await engine.prepare_receive(REQUEST)
        beginning = asyncio.create_task(engine.begin_receive())
        await asyncio.sleep(0)
        await engine.abort_receive()
        engine.may_pause.set()
        with pytest.raises(PublicationFailed, match="was aborted"):
            await beginning
        assert not engine.paused and engine._version == 1, "nothing was written"

    asyncio.run(scenario())


def test_an_abort_during_a_commit_leaves_workers_paused() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.may_pause.set()
        await engine.prepare_receive(REQUEST)
        await engine.begin_receive()
        committing = asyncio.create_task(engine.commit(Version(2), "keep"))
        await asyncio.sleep(0.01)
        await engine.abort_receive()
        assert engine.paused, "it generates while weights are written"
        engine.workers.may_place.set()
        await committing
        assert not engine.paused

    asyncio.run(scenario())


@pytest.mark.parametrize("shadow", [True, False])
@pytest.mark.parametrize("told", [True, False])
def test_the_pause_begins_with_the_last_token(shadow: bool, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`told`: the engine tells when its last token came; otherwise the answer to the order to pause counts."""
    token_s = [0.0]
    if told:
        monkeypatch.setattr(FakeEngine, "_last_token_s", lambda _: token_s[0])

    async def scenario() -> None:
        engine = FakeEngine()
        await engine.prepare_receive(REQUEST)
        if shadow:
            engine._incoming = Incoming(REQUEST, True)
        pausing = asyncio.create_task(engine.commit(Version(2), "keep") if shadow else engine.begin_receive())
        await asyncio.sleep(0.2)  # the steps that it had begun
        token_s[0] = stopped = time.perf_counter()
        engine.may_pause.set()
        if not shadow:
            await pausing
            pausing = asyncio.create_task(engine.commit(Version(2), "keep"))
        await asyncio.sleep(0.05)
        engine.workers.may_place.set()
        report = await pausing
        assert 0.05 <= report.pause_s + 1e-3 <= time.perf_counter() - stopped + 2e-3

    asyncio.run(scenario())


def test_the_pause_of_an_engine_that_has_nothing_to_do_begins_with_its_order() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.may_pause.set()
        engine.workers.may_place.set()
        engine._last_token_s = lambda: 0.0  # type: ignore[method-assign]
        await engine.prepare_receive(REQUEST)
        began = time.perf_counter()
        await engine.begin_receive()
        report = await engine.commit(Version(2), "keep")
        assert 0.0 < report.pause_s <= time.perf_counter() - began

    asyncio.run(scenario())


def test_what_is_asked_for_while_workers_stand_begins_after_it() -> None:
    """Under the name of what lies in place then, which another publication of the same version does not share."""

    async def scenario() -> None:
        engine = FakeEngine()
        for event in (engine.may_pause, engine.workers.may_place, engine.may_sample):
            event.set()
        for _ in range(2):
            await engine.prepare_receive(REQUEST)
            await engine.begin_receive()
            asking = asyncio.create_task(engine.generate([1], Sampling(5)))
            await asyncio.sleep(0.01)
            assert not asking.done()
            await engine.commit(Version(2), "keep")
            await asking
        assert len(engine.begun) == len(set(engine.begun)) == 2
        assert all(key.startswith("2.") for key in engine.begun)

    asyncio.run(scenario())


@pytest.mark.parametrize("dropped_by", ["an abort", "a commit"])
def test_what_lived_through_a_dropped_version_is_refused(dropped_by: str) -> None:
    """Whatever an engine made of it: its tokens may be of weights that were half-written."""

    async def scenario() -> None:
        engine = FakeEngine()
        engine.may_pause.set()
        engine.workers.may_place.set()
        engine.workers.failing = True
        sampling = asyncio.create_task(engine.generate([1], Sampling(5)))
        await asyncio.sleep(0)
        await engine.prepare_receive(REQUEST)
        await engine.begin_receive()
        if dropped_by == "an abort":
            await engine.abort_receive()
        else:
            with pytest.raises(PublicationFailed):
                await engine.commit(Version(2), "keep")
        with pytest.raises(InvalidState, match="no version is in place"):
            await engine.generate([1], Sampling(5))
        engine.workers.failing = False
        await engine.prepare_receive(REQUEST)
        await engine.commit(Version(3), "keep")
        engine.may_sample.set()
        assert await engine.generate([1], Sampling(5))
        with pytest.raises(InvalidState, match="no version was in place for a while"):
            await sampling

    asyncio.run(scenario())


def test_nothing_is_sampled_before_the_first_version() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine._version = None
        with pytest.raises(InvalidState, match="no version is in place"):
            await engine.generate([1], Sampling(5))
        loop, ended = SlowLoop(), list[Completion | None]()
        with pytest.raises(InvalidState, match="no version is in place"):
            loop.submit(Request([1], Sampling(5), ended.append))

    asyncio.run(scenario())

"""An engine that stands still is found; one that is slow, idle or paused is not."""

import asyncio
import threading
from pathlib import Path

import pytest

from services.rollout.engines.transformers.engine import TransformersEngine
from services.rollout.member.process import watch
from tests.services.rollout.coordinator import until
from tests.services.rollout.stack import Stack, play

pytestmark = pytest.mark.slow
LIMIT_S = 2.0


def watching(stack: Stack) -> asyncio.Task[None]:
    return asyncio.create_task(watch(stack.replica, LIMIT_S, stack.replica.died_of))


def test_an_engine_that_stands_still_dies(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        engine, goes_on = stack.replica.engine, threading.Event()
        assert isinstance(engine, TransformersEngine)
        engine._decode_loop._token = goes_on.wait
        stack.coordinator.issue(0, max_response_tokens=8)
        task = watching(stack)
        try:
            async with asyncio.timeout(60):
                await stack.replica.died.wait()
            await task
            assert "has not finished a batch for 2 s" in stack.replica.failure
        finally:
            goes_on.set()

    play(tied_model, scenario)


def test_an_engine_that_works_is_idle_or_paused_lives(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        task = watching(stack)
        await asyncio.sleep(1.5 * LIMIT_S)  # idle for longer than it may stand still
        for prompt in range(40):
            stack.coordinator.issue(prompt, samples=4, max_response_tokens=60)
        await until(lambda: stack.coordinator.answered >= 20)
        await stack.publish(2)
        await until(lambda: stack.coordinator.answered == 40)
        assert not stack.replica.died.is_set() and not task.done()
        task.cancel()

    play(tied_model, scenario)


def test_an_engine_that_starts_is_not_asked(tied_model: Path) -> None:
    async def scenario(stack: Stack) -> None:
        async with stack.replica._turn:
            assert stack.replica.ready_engine is None
        assert stack.replica.ready_engine is stack.replica.engine

    play(tied_model, scenario)

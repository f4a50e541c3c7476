"""A replica takes fewer leases where its engine's cache is too small for all of its slots."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.wire.arrays import unpack_logprobs, unpack_tokens
from services.rollout.engine import Completion, EngineStats, Response, Sampling
from services.rollout.engines.transformers.engine import TransformersEngine
from services.rollout.engines.versioned import VersionedEngine
from services.rollout.engines.vllm.schedulers import SchedulerStats
from tests.models import random_model
from tests.services.rollout.coordinator import until
from tests.services.rollout.jobs import ENGINE_OPTIONS, job_spec
from tests.services.rollout.reference import logprobs
from tests.services.rollout.stack import Stack, replica_stack

GROUPS, SAMPLES = 3, 4


def test_after_a_preemption_fewer_episodes_generate(tied_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 slots; one preemption leaves 12, of the 15 that generate when it is noticed."""
    may_end, preempted = asyncio.Semaphore(0), [0]
    generate = VersionedEngine.generate

    async def held(self: Any, prompt_tokens: Sequence[int], sampling: Sampling, response: Response) -> Completion:
        await may_end.acquire()
        return await generate(self, prompt_tokens, sampling, response)

    monkeypatch.setattr(VersionedEngine, "generate", held)
    monkeypatch.setattr(TransformersEngine, "stats", lambda _: EngineStats(0, 0, 0.0, preempted=preempted[0]))

    async def scenario() -> None:
        async with replica_stack() as stack:
            leases, coordinator = stack.replica.leases, stack.coordinator
            await stack.serve(job_spec(tied_model, rollout={"samples_per_prompt": 1}))
            for row in range(20):
                coordinator.issue(row, samples=1, max_response_tokens=4)
            await until(lambda: leases.held == 16, 60)
            assert leases.slots == 16
            preempted[0] = 1
            for ended in range(1, 5):
                may_end.release()
                await until(lambda count=ended: coordinator.answered == count and leases.held == 16 - count, 60)
            assert leases.slots == 12 and len(coordinator.waiting) == 4 and not leases.asking
            may_end.release()
            await until(lambda: len(coordinator.waiting) == 3 and leases.held == 12, 60)
            for _ in range(15):
                may_end.release()
            await until(lambda: coordinator.answered == 20, 60)
            assert leases.slots == 13, "one more, as about 12 have ended since"

    asyncio.run(scenario())


async def generated(stack: Stack, seen: set[int]) -> None:
    """Waits for the groups; `seen` gets the slots that are used meanwhile."""
    coordinator = stack.coordinator

    def ended() -> bool:
        seen.add(stack.replica.leases.slots)
        return coordinator.answered == GROUPS

    await until(ended, 300)
    assert not coordinator.dropped, coordinator.dropped


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.matrix  # the test above, test_concurrency.py and test_vllm_schedulers.py have its parts
@pytest.mark.timeout(400)
def test_vllm_with_a_small_cache_gets_fewer_samples(tied_model: Path) -> None:
    """Its cache has 8 blocks of 128 tokens, and 4 samples need up to 16."""
    small = {**ENGINE_OPTIONS["vllm"], "kv_cache_memory_bytes": 1 << 20}
    rollout = {"max_response_tokens": 400, "engine_options": small, "samples_per_prompt": SAMPLES}
    seen = set[int]()

    async def scenario() -> Stack:
        async with replica_stack("vllm") as stack:
            spec = job_spec(tied_model, "vllm", rollout=rollout, data={"max_prompt_tokens": 100})
            await stack.serve(spec)
            engine = stack.replica.engine
            assert engine is not None and engine.capacity == 4
            for row in range(GROUPS):
                stack.coordinator.issue(row, samples=SAMPLES, max_response_tokens=400)
            await generated(stack, seen)
            stats = engine.stats()
            assert stats is not None and stats.preempted > 0
            return stack

    stack = asyncio.run(scenario())
    assert min(seen) < 4, seen
    model = random_model(tied=True, seed=1)
    for group in stack.coordinator.groups.values():
        prompt = unpack_tokens(group.prompt_tokens).tolist()
        for trajectory in group.trajectories:
            expected = logprobs(model, prompt, unpack_tokens(trajectory.tokens).tolist())
            assert np.abs(unpack_logprobs(trajectory.logprobs) - np.asarray(expected)).max() < 1e-3


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.matrix  # test_vllm_schedulers.py counts without an engine
@pytest.mark.timeout(400)
def test_vllm_loses_no_slot_by_publications_that_clear_its_cache(
    tied_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun_again, seen = list[int](), set[int]()
    count = SchedulerStats._count_preempted

    def counted(self: SchedulerStats, number: int, waiting: int) -> None:
        begun_again.append(number)
        count(self, number, waiting)

    monkeypatch.setattr(SchedulerStats, "_count_preempted", counted)

    async def scenario() -> None:
        async with replica_stack("vllm") as stack:
            await stack.serve(job_spec(tied_model, "vllm"))
            for row in range(GROUPS):
                stack.coordinator.issue(row, samples=SAMPLES, max_response_tokens=200)
            await until(lambda: stack.replica.load().running > 4, 60)
            await stack.publish(2)
            await generated(stack, seen)
            assert stack.replica.engine is not None
            stats = stack.replica.engine.stats()
            assert stats is not None and stats.preempted == 0
            assert seen == {stack.replica.engine.capacity}

    asyncio.run(scenario())
    assert sum(begun_again) > 0, "vLLM has told of the requests that were computed again"

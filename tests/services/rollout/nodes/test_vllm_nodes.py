"""vLLM over two nodes: two launchers on this machine are one replica of two workers."""

import asyncio
import signal
from pathlib import Path

import numpy as np
import pytest

from millrace.wire.arrays import unpack_logprobs, unpack_tokens
from tests.models import random_model
from tests.services.rollout.coordinator import configure, until
from tests.services.rollout.nodes.engine_nodes import WITHIN_S, Replica, replica
from tests.services.rollout.reference import logprobs

pytestmark = [pytest.mark.slow, pytest.mark.matrix]
"""test_nodes.py shows without an engine that nodes meet, start, stop and end as one, and each loss."""


def test_two_nodes_are_one_replica(tmp_path: Path) -> None:
    """One member generates, gets versions into the workers of both nodes, and drains."""

    async def scenario() -> None:
        async with replica(tmp_path) as two:
            await two.registered(1)
            member = two.coordinator.members[two.member_id]
            assert len(member.host.split(", ")) == 2
            assert (await configure(two.peer, two.spec)).world_size == 2
            await serves_what_is_published(two)
            await drains_by_its_follower(two)

    asyncio.run(scenario())


def test_the_loss_of_the_follower_of_a_worker_and_of_the_leader(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with replica(tmp_path) as two:
            await two.registered(1)
            assert (await configure(two.peer, two.spec)).world_size == 2
            await two.lose_follower()
            assert (await configure(two.peer, two.spec)).world_size == 2, "both nodes are back"
            before = two.member_id
            two.nodes[1].forked[-1].kill()
            await until(lambda: before in two.coordinator.left, WITHIN_S)
            assert "VllmWorker-1 has ended" in two.coordinator.left[before]
            await two.registered(3)
            await configure(two.peer, two.spec)
            two.nodes[0].forked[0].kill()
            await two.registered(4)
            assert (await configure(two.peer, two.spec)).world_size == 2, "both nodes are back"
            two.nodes[0].process.send_signal(signal.SIGTERM)
            assert [await asyncio.wait_for(node.process.wait(), WITHIN_S) for node in two.nodes] == [0, 0]

    asyncio.run(scenario())


async def serves_what_is_published(two: Replica) -> None:
    first, second = random_model(tied=True, seed=1), random_model(tied=True, seed=2)
    await two.publish(first, 1)
    oracle = await two.answer()
    await two.publish_shards(second, 2)
    changed = await two.answer()
    await two.publish_shards(first, 3)
    again = await two.answer()
    (expected,), (found,), (other,) = oracle.trajectories, again.trajectories, changed.trajectories
    assert found.tokens == expected.tokens and found.logprobs == expected.logprobs, "bit for bit as the loader"
    assert other.logprobs != expected.logprobs
    prompt, response = unpack_tokens(again.prompt_tokens), unpack_tokens(found.tokens)
    reference = logprobs(first, prompt.tolist(), response.tolist(), temperature=0.0)
    assert np.abs(unpack_logprobs(found.logprobs) - reference).max() < 1e-4


async def drains_by_its_follower(two: Replica) -> None:
    two.nodes[1].process.send_signal(signal.SIGTERM)
    assert [await asyncio.wait_for(node.process.wait(), WITHIN_S) for node in two.nodes] == [0, 0]
    assert two.coordinator.left[two.member_id] == "it was told to stop"

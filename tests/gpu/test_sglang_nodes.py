"""SGLang over two nodes with one GPU each: two launchers on this machine are one replica of two schedulers."""

import asyncio
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from millrace.wire.arrays import unpack_logprobs, unpack_tokens
from services.rollout.engines import probe
from tests.models import random_model
from tests.services.rollout.coordinator import configure
from tests.services.rollout.nodes.engine_nodes import WITHIN_S, Replica, replica
from tests.services.rollout.reference import logprobs

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.timeout(900),
]


def test_two_nodes_are_one_replica(tmp_path: Path) -> None:
    """One member generates, gets versions into the schedulers of both nodes, is lost with its follower, comes back and
    drains."""
    if not (found := probe("sglang")).ok:
        pytest.skip(found.why)

    async def scenario() -> None:
        async with replica(tmp_path, "sglang", "bfloat16") as two:
            await two.registered(1)
            assert (await configure(two.peer, two.spec)).world_size == 2
            await serves_what_is_published(two)
            await two.lose_follower()
            assert (await configure(two.peer, two.spec)).world_size == 2, "both nodes are back"
            two.nodes[1].process.send_signal(signal.SIGTERM)
            assert [await asyncio.wait_for(node.process.wait(), WITHIN_S) for node in two.nodes] == [0, 0]

    asyncio.run(scenario())


async def serves_what_is_published(two: Replica) -> None:
    """Greedy answers have the log-probabilities of the model published last, by the mean KL of bfloat16."""
    answers = []
    for version, seed in enumerate((1, 2, 1), 1):
        model = random_model(tied=True, seed=seed, dtype=torch.bfloat16)
        await two.publish(model, version)
        answer = await two.answer()
        (found,) = answer.trajectories
        answers.append(found)
        prompt, response = unpack_tokens(answer.prompt_tokens), unpack_tokens(found.tokens)
        reference = logprobs(model, prompt.tolist(), response.tolist(), temperature=0.0)
        difference = reference - unpack_logprobs(found.logprobs)
        assert (np.exp(difference) - 1 - difference).mean() < 0.01
    assert answers[0].tokens == answers[2].tokens and answers[0].logprobs == answers[2].logprobs
    assert answers[1].logprobs != answers[0].logprobs

"""A replica whose episodes agents play over HTTP, with the Transformers engine."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from millrace.trajectories import sampled_spans
from millrace.wire.arrays import unpack_logprobs, unpack_tokens
from millrace.wire.v1 import common_pb2
from services.coordinator.state.group import Wanted, fault
from services.rollout.engine import Sample, Sampling
from services.rollout.engines.versioned import VersionedEngine
from services.rollout.sessions.server import SessionServer
from tests.models import random_model, save_tiny_model
from tests.services.rollout.coordinator import until
from tests.services.rollout.jobs import job_spec
from tests.services.rollout.reference import logprobs
from tests.services.rollout.stack import replica_stack


async def agent(url: str, turns: int) -> None:
    """Claims an episode and plays it, as a program elsewhere would."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        async with asyncio.timeout(60):
            while (reply := await http.post("/sessions")).status_code == 429:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        claimed = reply.json()
        headers, base = {"authorization": f"Bearer {claimed['key']}"}, f"/sessions/{claimed['id']}"
        messages = list(claimed["row"]["prompt"])
        for number in range(turns):
            body = {"messages": messages, "max_tokens": 6}
            reply = await http.post(f"{base}/v1/chat/completions", json=body, headers=headers)
            messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": f"and {number}?"}]
            await http.post(f"{base}/reward", json={"reward": 0.25, "turn": number}, headers=headers)
        await http.post(f"{base}/end", json={"reward": 1.0}, headers=headers)


def test_what_is_trained_are_the_tokens_that_the_engine_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_model(tmp_path, tied=True)
    seen: list[list[int]] = []
    generate = VersionedEngine.generate

    async def recorded(self: Any, prompt_tokens: Sequence[int], sampling: Sampling) -> Sample:
        sample = await generate(self, prompt_tokens, sampling)
        seen.append([*prompt_tokens, *sample.tokens.tolist()])
        return sample

    monkeypatch.setattr(VersionedEngine, "generate", recorded)

    async def scenario() -> common_pb2.Group:
        async with replica_stack() as stack:
            server = SessionServer(stack.replica.sessions, "127.0.0.1", 0)
            server.start()
            try:
                spec = job_spec(model, rollout={"agent": "external", "max_response_tokens": 150})
                await stack.serve(spec, version=3)
                prompt_id = stack.coordinator.issue(7, samples=2, max_response_tokens=150)
                await asyncio.gather(*(agent(f"http://127.0.0.1:{server.port}", 3) for _ in range(2)))
                await until(lambda: stack.coordinator.answered == 1, 90.0)
                assert not stack.coordinator.dropped
                return stack.coordinator.groups[prompt_id]
            finally:
                await server.stop()

    group = asyncio.run(scenario())
    assert fault(group, Wanted(2, temperature=1.0, most_tokens=350)) is None
    weights, trained = random_model(tied=True, seed=3), []
    for trajectory in group.trajectories:
        prompt = unpack_tokens(trajectory.prompt_tokens or group.prompt_tokens).tolist()
        tokens = unpack_tokens(trajectory.tokens).tolist()
        spans = list(sampled_spans(trajectory))
        trained += [[*prompt, *tokens[:end]] for _, end in spans]
        at = [place for start, end in spans for place in range(start, end)]
        expected = np.asarray(logprobs(weights, prompt, tokens))[at]
        assert np.abs(unpack_logprobs(trajectory.logprobs) - expected).max() < 1e-3
    assert sorted(trained) == sorted(seen) and len(seen) == 6
    assert [turn.reward for one in group.trajectories for turn in one.turns] == [0.25] * 6
    assert [one.reward for one in group.trajectories if one.HasField("reward")] == [1.0] * 2

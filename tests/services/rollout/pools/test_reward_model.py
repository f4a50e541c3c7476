"""Groups that a reward model in a pool scores: the score, the wait for a replica, another replica after a failure."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from millrace.contracts.methods import ScoringRpc
from millrace.contracts.v1 import common_pb2, scoring_pb2
from millrace.drops import DropReason
from millrace.errors import InvalidRequest, InvalidState
from millrace.spec import JobSpec
from millrace.wire.arrays import pack_tokens
from services.rollout.engines.transformers.scoring import TransformersScoring
from tests.models import byte_tokenizer, save_reward_model
from tests.services.rollout.coordinator import JOB, until
from tests.services.rollout.jobs import job_spec
from tests.services.rollout.pools.pool_stack import pool_replica
from tests.services.rollout.stack import replica_stack

pytestmark = pytest.mark.slow
LIKED = {"name": "liked", "pool": "quality", "weight": 0.5}


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("reward"))


def job(model: Path, reward_model: Path, functions: list[dict[str, Any]]) -> JobSpec:
    pool = {"name": "quality", "path": str(reward_model), "dtype": "float32", "engine_options": {"device": "cpu"}}
    spec = job_spec(model, rollout={"max_response_tokens": 8}).model_dump(mode="json")
    return JobSpec.model_validate(spec | {"pools": [pool], "reward": {"functions": functions, "workers": 1}})


def judged(reward_model: Path, prompt: Any, answer: str) -> float:
    """The reward of a conversation, from the model alone."""
    messages = [*prompt, {"role": "assistant", "content": answer}]
    tokens = byte_tokenizer().apply_chat_template(messages, tokenize=True, return_dict=False)
    model = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32).eval()
    model.config.pad_token_id = None
    with torch.no_grad():
        return float(model(torch.tensor([tokens])).logits[0, 0])


def scores_of(group: common_pb2.Group) -> list[tuple[str, float, dict[str, float]]]:
    return [(one.text, one.reward, json.loads(one.reward_details)) for one in group.trajectories]


def test_a_reward_model_scores_beside_a_function(tied_model: Path, reward_model: Path) -> None:
    """The group waits until the pool has a replica; nothing else does."""
    prompt = [{"role": "user", "content": "what?"}]

    async def scenario() -> None:
        async with replica_stack() as stack, pool_replica("quality") as scoring:
            spec = job(tied_model, reward_model, [{"name": "right", "function": "exact"}, LIKED])
            await stack.serve(spec)
            stack.coordinator.issue(0, prompt, ground_truth="x")
            await until(lambda: stack.coordinator.pools_asked)
            assert not stack.coordinator.answered
            await scoring.configure(spec)
            stack.coordinator.pools["quality"] = [scoring.address]
            await until(lambda: stack.coordinator.answered, 60)
            for answer, reward, details in scores_of(stack.coordinator.groups["0-0"]):
                assert details["liked"] == pytest.approx(judged(reward_model, prompt, answer), abs=1e-3)
                assert reward == pytest.approx(details["right"] + 0.5 * details["liked"])
            assert scoring.replica.tokens > 0

    asyncio.run(scenario())


def test_another_replica_scores_what_one_cannot(tied_model: Path, reward_model: Path) -> None:
    """One has died, one is ready for another job, one is right. Without any function there are no processes."""

    async def scenario() -> None:
        async with (
            replica_stack() as stack,
            pool_replica("quality") as dead,
            pool_replica("quality") as other,
            pool_replica("quality") as right,
        ):
            spec = job(tied_model, reward_model, [LIKED])
            await other.configure(spec, "job-other")
            await right.configure(spec)
            await dead.die()
            stack.coordinator.pools["quality"] = [dead.address, other.address, right.address]
            await stack.serve(spec)
            assert stack.replica.job is not None and not stack.replica.job.scoring._alive
            for number in range(3):
                stack.coordinator.issue(number)
            await until(lambda: stack.coordinator.answered == 3, 60)
            assert len(stack.coordinator.groups) == 3
            assert (other.replica.tokens, right.replica.tokens > 0) == (0, True)

    asyncio.run(scenario())


def test_a_conversation_that_is_too_long_costs_its_group(tied_model: Path, reward_model: Path) -> None:
    """The reward model takes 512 tokens by its config; here it is made to take fewer."""

    async def scenario() -> None:
        async with replica_stack() as stack, pool_replica("quality") as scoring:
            spec = job(tied_model, reward_model, [LIKED])
            await scoring.configure(spec)
            engine = scoring.replica._engine
            assert isinstance(engine, TransformersScoring)
            engine.context = 30
            stack.coordinator.pools["quality"] = [scoring.address]
            await stack.serve(spec)
            stack.coordinator.issue(0, [{"role": "user", "content": "long " * 10}])
            await until(lambda: stack.coordinator.answered, 60)
            drop = stack.coordinator.dropped["0-0"]
            assert drop.reason is DropReason.REWARD_FAILED
            assert (
                "liked gave no score" in drop.detail and "more than the 30 that the reward model takes" in drop.detail
            )

    asyncio.run(scenario())


def test_what_a_pool_refuses(tied_model: Path, reward_model: Path) -> None:
    async def scenario() -> None:
        async with pool_replica("quality") as scoring:
            spec = job(tied_model, reward_model, [LIKED])
            request = scoring_pb2.ScoreConversationsRequest(job_id=JOB, pool="quality")
            request.conversations.add(prompt='"what?"', answer="so")
            with pytest.raises(InvalidState, match="is ready for no job"):
                await scoring.peer.call(ScoringRpc.ScoreConversations, request)
            await scoring.configure(spec)
            answer = await scoring.peer.call(ScoringRpc.ScoreConversations, request)
            assert np.isfinite(answer.scores[0].reward) and not answer.scores[0].failure
            sequence = scoring_pb2.TokenSequence(tokens=pack_tokens([1, 2]), scored=[{"start": 1, "end": 2}])
            tokens = scoring_pb2.ScoreTokensRequest(job_id=JOB, pool="quality", sequences=[sequence])
            with pytest.raises(InvalidState, match="not to give log-probabilities"):
                await scoring.peer.call(ScoringRpc.ScoreTokens, tokens)
            request.conversations[0].prompt = "{"
            with pytest.raises(InvalidRequest, match="prompt: is not JSON"):
                await scoring.peer.call(ScoringRpc.ScoreConversations, request)
            scoring.replica.drain()
            with pytest.raises(InvalidState, match="drains"):
                await scoring.configure(spec)

    asyncio.run(scenario())

"""Groups with a teacher's scores: those of its own pass, in requests of a bounded size, and what is refused."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from millrace.contracts.methods import ScoringRpc
from millrace.contracts.v1 import common_pb2, scoring_pb2
from millrace.drops import DropReason
from millrace.errors import InvalidJob, InvalidRequest
from millrace.spec import JobSpec
from millrace.wire.arrays import TokenScores, pack_tokens, unpack_tokens
from tests.models import byte_tokenizer, save_tiny_model
from tests.services.rollout.coordinator import JOB, until
from tests.services.rollout.jobs import job_spec
from tests.services.rollout.pools.pool_stack import pool_replica
from tests.services.rollout.reference import logits
from tests.services.rollout.stack import replica_stack

pytestmark = pytest.mark.slow
TOP = 6


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("teacher"), tied=False, seed=9)


def job(model: Path, teacher: Path, loss: str = "forward_kl_topk", **pool: Any) -> JobSpec:
    held = {"name": "teacher", "path": str(teacher), "dtype": "float32", "engine_options": {"device": "cpu"}, **pool}
    spec = job_spec(model, rollout={"max_response_tokens": 12, "temperature": 0.8}).model_dump(mode="json")
    spec["algorithm"]["distillation"] = {"pool": "teacher", "loss": loss, "top_k": TOP}
    return JobSpec.model_validate(spec | {"pools": [held]})


def check(group: common_pb2.Group, teacher: Path, top: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    prompt = unpack_tokens(group.prompt_tokens)
    for trajectory in group.trajectories:
        response = unpack_tokens(trajectory.tokens)
        rows = (logits(model, [*prompt, *response])[len(prompt) - 1 : -1] / 0.8).log_softmax(-1)
        scores = TokenScores.of(trajectory.teacher, len(response), top)
        expected = rows[range(len(response)), response.astype(np.int64)].numpy()
        np.testing.assert_allclose(scores.logprobs_n, expected, atol=1e-4)
        np.testing.assert_allclose(scores.top_logprobs_nk, rows.topk(top, dim=-1).values.numpy(), atol=1e-4)


@pytest.mark.parametrize(("loss", "top", "batch_tokens"), [("k1", 0, 4096), ("forward_kl_topk", TOP, 40)])
def test_a_group_brings_the_scores_of_the_teacher(
    tied_model: Path, teacher_folder: Path, loss: str, top: int, batch_tokens: int
) -> None:
    """At the job's temperature. Held-out prompts have none."""

    async def scenario() -> None:
        async with replica_stack() as stack, pool_replica("teacher") as scoring:
            spec = job(tied_model, teacher_folder, loss, batch_tokens=batch_tokens)
            await scoring.configure(spec)
            stack.coordinator.pools["teacher"] = [scoring.address]
            await stack.serve(spec)
            for number in range(2):
                stack.coordinator.issue(number, max_response_tokens=12, temperature=0.8)
            stack.coordinator.waiting[1].purpose = common_pb2.PURPOSE_EVALUATION
            await until(lambda: stack.coordinator.answered == 2, 60)
            check(stack.coordinator.groups["0-0"], teacher_folder, top)
            held_out = stack.coordinator.groups["0-1"].trajectories
            assert not any(trajectory.HasField("teacher") for trajectory in held_out)

    asyncio.run(scenario())


def test_a_teacher_that_refuses_the_tokens_costs_the_group(tied_model: Path, teacher_folder: Path) -> None:
    async def scenario() -> None:
        async with replica_stack() as stack, pool_replica("teacher") as scoring:
            spec = job(tied_model, teacher_folder)
            await scoring.configure(spec)
            engine = scoring.replica._engine
            assert engine is not None
            engine.vocabulary = 20
            stack.coordinator.pools["teacher"] = [scoring.address]
            await stack.serve(spec)
            stack.coordinator.issue(0)
            await until(lambda: stack.coordinator.answered, 60)
            drop = stack.coordinator.dropped["0-0"]
            assert drop.reason is DropReason.BAD_LOGPROBS
            assert drop.detail.startswith("the teacher: a sequence has tokens from")

    asyncio.run(scenario())


def test_models_that_cannot_teach_are_refused(tied_model: Path, teacher_folder: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with pool_replica("teacher") as scoring:
            long = job(tied_model, teacher_folder).model_dump(mode="json")
            long["data"]["max_prompt_tokens"] = 600
            with pytest.raises(InvalidJob, match="has positions for 512 tokens, and prompt and response may have 612"):
                await scoring.configure(JobSpec.model_validate(long))
            other = save_tiny_model(tmp_path, tied=True)
            tokenizer = byte_tokenizer()
            tokenizer.add_tokens(["<new>"])
            tokenizer.save_pretrained(tmp_path / "policy")
            save_tiny_model(tmp_path / "policy-model", tied=True)
            tokenizer.save_pretrained(tmp_path / "policy-model")
            with pytest.raises(InvalidJob, match=r"other ids than the policy's for 1 tokens, \[\"<new>\"\] first"):
                await scoring.configure(job(tmp_path / "policy-model", other))
            with pytest.raises(InvalidJob, match="the job has no pool 'teacher'"):
                await scoring.configure(job_spec(tied_model))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("tokens", "spans", "reason"),
    [
        ([1, 2, 3], [(0, 2)], "is not after 0"),
        ([1, 2, 3], [(1, 4)], "within 3 tokens"),
        ([1, 2, 3], [(2, 3), (1, 2)], "is not after 2"),
        ([1, 2, 3], [], "nothing of a sequence is to be scored"),
        ([1, 900], [(1, 2)], "tokens from 1 to 900, the model has 259"),
        ([1] * 513, [(1, 2)], "513 tokens, the model takes 512"),
    ],
)
def test_requests_that_are_refused(
    tied_model: Path, teacher_folder: Path, tokens: list[int], spans: list[tuple[int, int]], reason: str
) -> None:
    async def scenario() -> None:
        async with pool_replica("teacher") as scoring:
            await scoring.configure(job(tied_model, teacher_folder))
            scored = [scoring_pb2.TokenSpan(start=start, end=end) for start, end in spans]
            sequence = scoring_pb2.TokenSequence(tokens=pack_tokens(tokens), scored=scored)
            request = scoring_pb2.ScoreTokensRequest(job_id=JOB, pool="teacher", sequences=[sequence], top=2)
            with pytest.raises(InvalidRequest, match=reason):
                await scoring.peer.call(ScoringRpc.ScoreTokens, request)

    asyncio.run(scenario())

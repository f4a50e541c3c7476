"""The engines of pools that reply, against plain forward passes."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from millrace.spec.pool import PoolTask
from services.rollout.engine import Completion, Sampling, StopReason
from services.rollout.engines import create_replying
from tests.models import byte_tokenizer, save_judge_model
from tests.services.rollout.pools.test_scoring_engine import VLLM, held
from tests.services.rollout.reference import logits

pytestmark = pytest.mark.slow
PROMPT = byte_tokenizer().encode("How good?\n")


@pytest.mark.parametrize("name", ["transformers", VLLM])
def test_replies_are_those_of_the_model_in_the_folder(name: str, tmp_path: Path) -> None:
    """A greedy one that the model ends, one that is cut, and one that a string ends."""
    folder = save_judge_model(tmp_path)

    async def replies() -> list[Completion]:
        engine = create_replying(name)
        await engine.start(held(folder, PoolTask.REPLIES, engine=name))
        try:
            assert engine.vocabulary == 259 and engine.context == 512 and engine.at_once > 1
            asked = [Sampling(32, 0.0), Sampling(3, 0.0), Sampling(32, 0.0, stop=(":",))]
            return list(await asyncio.gather(*(engine.reply(PROMPT, each) for each in asked)))
        finally:
            await engine.stop()

    whole, cut, stopped = asyncio.run(replies())
    assert [each.text for each in (whole, cut, stopped)] == ["Score: 7", "Sco", "Score"]
    reasons = [each.stop_reason for each in (whole, cut, stopped)]
    assert reasons == [StopReason.END_OF_TURN, StopReason.LENGTH, StopReason.STOP_STRING]
    tokens = whole.tokens.tolist()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = logits(model, [*PROMPT, *tokens])[len(PROMPT) - 1 : -1].log_softmax(-1)
    assert rows.argmax(-1).tolist() == tokens
    np.testing.assert_allclose(whole.logprobs, rows[range(len(tokens)), tokens].numpy(), atol=1e-3)

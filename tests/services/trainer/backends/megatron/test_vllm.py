"""Hugging Face, Megatron and vLLM, which gets its weights by publication, give the same log-probabilities for every
architecture, in float32.

`make test` has, in vLLM, DeepSeek-V3 here and Qwen3 in tests/services/rollout/engines/test_engines.py. Of MATRIX, Qwen2
is a Qwen3 with other norms and biases, Qwen3-MoE and Mixtral are models of experts as DeepSeek-V3, Moonlight is one
without compressed queries, the text path of Qwen2.5-VL a Qwen2.

Megatron runs these models, of the sizes that vLLM takes, in `make test-all` only: that it gives the same
log-probabilities as Hugging Face for every architecture is shown by test_parity.py, with smaller ones.

Of Qwen2.5-VL vLLM runs the text path as the Qwen2 that it is.
"""

import functools
import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.services.trainer.backends.megatron import batch, tiny
from tests.services.trainer.backends.megatron.conftest import KINDS
from tests.services.trainer.backends.megatron.launch import launch, once

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]
"""The first test of each launch waits for it. To import vLLM here would take every worker of pytest a second."""

BFLOAT16 = "deepseek_v3 in bfloat16"
MATRIX = ("qwen2", "qwen3", "qwen3_moe", "mixtral", "moonlight", "qwen2_5_vl", BFLOAT16)
"""What vLLM runs in `make test-all` only."""
IN_VLLM = [pytest.param(kind, marks=[pytest.mark.matrix] * (kind in MATRIX)) for kind in (*KINDS, BFLOAT16)]
Served = Callable[[str], tuple[PreTrainedModel, str]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Kind → its model and its folder."""
    root = tmp_path_factory.mktemp("served")
    return functools.cache(lambda kind: (tiny.save(kind, root / kind, served=True), str(root / kind)))


@pytest.fixture(scope="module")
def megatron(served: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = {kind: {"model": served(kind)[1], "steps": 0} for kind in KINDS}
    answers: dict[str, Any] = launch(1, tmp_path_factory.mktemp("megatron"), train={"cases": cases})["train"]
    return answers


@pytest.fixture(scope="module")
def vllm(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Case → what `on_vllm` answers of it. Those of MATRIX are launched by themselves."""
    root = tmp_path_factory.mktemp("vllm")

    def case(name: str) -> tuple[str, str]:
        """The folder, and the dtype that vLLM computes in."""
        if name == BFLOAT16:  # with a router's bias that stays float32
            return served("deepseek_v3")[1], "bfloat16"
        model, folder = served(name)
        if name != "qwen2_5_vl":
            return folder, "float32"
        tiny.save_text_path(model, root / "text")
        return str(root / "text"), "float32"

    @once
    def answers(matrix: bool) -> dict[str, Any]:
        asked = {name: case(name) for name in (*KINDS, BFLOAT16) if (name in MATRIX) == matrix}
        module = "tests.services.trainer.backends.megatron.on_vllm"
        return launch(1, root / f"matrix-{matrix}", module=module, arguments=json.dumps(asked))

    return lambda name: answers(name in MATRIX)[name]


@torch.no_grad()
def plain(model: PreTrainedModel, sequence: Sequence[int], temperature: float) -> torch.Tensor:
    """Log-probability of each token but the first."""
    tokens = torch.tensor(sequence)
    logprobs_tv = (model(input_ids=tokens[None]).logits[0, :-1].float() / temperature).log_softmax(-1)
    return logprobs_tv.gather(1, tokens[1:, None])[:, 0]


@pytest.mark.parametrize("kind", IN_VLLM[: len(KINDS)])
def test_vllm_agrees_with_hugging_face(kind: str, served: Served, vllm: Callable[[str], dict[str, Any]]) -> None:
    for sequence, found in vllm(kind)["logprobs"]:
        expected = plain(served(kind)[0], sequence, temperature=1.0)
        torch.testing.assert_close(torch.tensor(found), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", IN_VLLM)
def test_shards_leave_in_vllm_what_whole_tensors_do(kind: str, vllm: Callable[[str], dict[str, Any]]) -> None:
    assert vllm(kind)["differing"] == [] and vllm(kind)["loaders"] == []


@pytest.mark.matrix  # test_trains_like_plain_pytorch in test_parity.py compares each kind on one rank
@pytest.mark.parametrize("kind", KINDS)
def test_megatron_agrees_with_hugging_face(kind: str, served: Served, megatron: dict[str, Any]) -> None:
    expected = []
    for trajectory in batch.trajectories():
        whole = plain(served(kind)[0], np.concatenate([trajectory.prompt, trajectory.response]), batch.TEMPERATURE)
        expected.append(whole[-len(trajectory.response) :])
    torch.testing.assert_close(torch.tensor(megatron[kind]["logprobs"]), torch.cat(expected), atol=2e-5, rtol=0)

"""Hugging Face, Megatron and vLLM give the same log-probabilities for every architecture, in float32.

Of Qwen2.5-VL vLLM runs the text path as the Qwen2 that it is: its own class of the whole needs torchvision, which the
CPU installation goes without.
"""

import json
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.services.trainer.backends.megatron import batch, tiny
from tests.services.trainer.backends.megatron.conftest import KINDS
from tests.services.trainer.backends.megatron.launch import launch

pytest.importorskip("vllm")
pytestmark = pytest.mark.timeout(400)
"""The first test waits for both launches."""

Served = dict[str, tuple[PreTrainedModel, str]]
LATENT = {"attention_config": {"backend": "CPU_MLA"}}
"""The other attention on latents that the CPU build has knows bfloat16 only."""
OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT,
    # The kernel for plain RoPE of 0.32's CPU build turns queries wrong that come as [tokens, heads, dimensions], as
    # attention on latents gives them: log-probabilities are off by 2. YaRN has none.
    "moonlight": {**LATENT, "compilation_config": {"custom_ops": ["-rotary_embedding"]}},
}
"""Of vLLM, where it needs any."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Each kind's model and its folder."""
    root = tmp_path_factory.mktemp("served")
    return {kind: (tiny.save(kind, root / kind, served=True), str(root / kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def megatron(served: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = {kind: {"model": folder, "steps": 0} for kind, (_, folder) in served.items()}
    answers: dict[str, Any] = launch(1, tmp_path_factory.mktemp("megatron"), train={"cases": cases})["train"]
    return answers


@pytest.fixture(scope="module")
def vllm(served: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("vllm")
    tiny.save_text_path(served["qwen2_5_vl"][0], root / "text")
    folders = {**{kind: folder for kind, (_, folder) in served.items()}, "qwen2_5_vl": str(root / "text")}
    cases = {kind: (path, OPTIONS.get(kind, {})) for kind, path in folders.items()}
    module = "tests.services.trainer.backends.megatron.on_vllm"
    return launch(1, root, module=module, arguments=json.dumps(cases))


@torch.no_grad()
def plain(model: PreTrainedModel, temperature: float) -> list[torch.Tensor]:
    """Of each token of each sequence of the batch but its first."""
    found = []
    for trajectory in batch.trajectories():
        tokens = torch.from_numpy(np.concatenate([trajectory.prompt, trajectory.response]).astype(np.int64))
        logprobs_tv = (model(input_ids=tokens[None]).logits[0, :-1].float() / temperature).log_softmax(-1)
        found.append(logprobs_tv.gather(1, tokens[1:, None])[:, 0])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_agrees_with_hugging_face(kind: str, served: Served, vllm: dict[str, Any]) -> None:
    expected = plain(served[kind][0], temperature=1.0)
    for found, logprobs_t in zip(vllm[kind], expected, strict=True):
        torch.testing.assert_close(torch.tensor(found), logprobs_t, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_megatron_agrees_with_hugging_face(kind: str, served: Served, megatron: dict[str, Any]) -> None:
    responses = [len(trajectory.response) for trajectory in batch.trajectories()]
    whole = plain(served[kind][0], batch.TEMPERATURE)
    expected = torch.cat([logprobs_t[-n:] for logprobs_t, n in zip(whole, responses, strict=True)])
    torch.testing.assert_close(torch.tensor(megatron[kind]["logprobs"]), expected, atol=2e-5, rtol=0)

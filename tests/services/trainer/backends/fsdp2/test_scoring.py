"""Token scores of whole models on one rank: chunks of logits where the architecture allows them, told where not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from services.trainer.backends import build
from services.trainer.protocol.backend import TokenScores
from services.trainer.protocol.microbatch import MicroBatch
from tests.services.trainer.backends.fsdp2.test_backend import samples
from tests.services.trainer.groups import job_spec

SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
CHANGING: dict[str, dict[str, Any]] = {
    "cohere2": {"logit_scale": 0.3, "sliding_window": 8},
    "granite": {"logits_scaling": 3.0},
    "phi": {},
    "nanochat": {"final_logit_softcapping": 2.0},
}
"""Models that scale, shift or cap what their linear layer gives."""


def saved(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **CHANGING.get(kind, {})}))
    if (bias := model.get_output_embeddings().bias) is not None:
        torch.nn.init.normal_(bias)
    model.save_pretrained(folder)
    return folder


def loss_of(logprobs_r: Tensor, entropy_r: Tensor) -> Tensor:
    return -logprobs_r.sum() + 0.1 * entropy_r.square().sum()


@pytest.mark.parametrize("kind", CHANGING)
def test_an_architecture_that_changes_its_logits_is_scored_in_chunks(
    kind: str, one_rank: torch.device, tmp_path: Path
) -> None:
    folder, drawn = saved(kind, tmp_path / kind), samples([(3, 5), (7, 40), (2, 1)])
    options = {"logprob_chunk_tokens": 16}
    with capture_logs() as told:
        backend = build(job_spec(folder, trainer={"backend_options": options, "token_budget": 64}), one_rank)
    assert told == []
    batch, found = MicroBatch.pack(drawn, range(len(drawn))), []

    def loss(_: MicroBatch, scores: TokenScores) -> tuple[Tensor, None]:
        assert scores.entropy_r is not None
        found.append(torch.stack([scores.logprobs_r, scores.entropy_r]))
        return loss_of(scores.logprobs_r, scores.entropy_r), None

    backend.forward_backward([batch], loss, temperature=0.7)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    alone = []
    for sample in drawn:
        tokens = torch.tensor([*sample.prompt, *sample.response]).long()
        log_p = (model(input_ids=tokens[None]).logits[0] / 0.7).log_softmax(-1)[len(sample.prompt) - 1 : -1]
        targets = tokens[len(sample.prompt) :, None]
        alone.append(torch.stack([log_p.gather(1, targets)[:, 0], -(log_p.exp() * log_p).sum(-1)]))
    expected_2r = torch.cat(alone, dim=1)
    loss_of(*expected_2r).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(found[0], expected_2r, atol=1e-4, rtol=1e-4)
    assert backend.gradient_norm() == pytest.approx(float(norm), rel=1e-3)


@pytest.mark.parametrize("kind", ["llama", *CHANGING])
def test_rounding_to_bfloat16_is_no_obstacle(kind: str, one_rank: torch.device, tmp_path: Path) -> None:
    with capture_logs() as told:
        build(job_spec(saved(kind, tmp_path / kind), trainer={"dtype": "bfloat16"}), one_rank)
    assert told == []


def test_whole_logits_are_told(one_rank: torch.device, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "llama")
    spec = job_spec(folder, model={"path": str(folder), "lora": {"rank": 4, "target_modules": ["lm_head"]}})
    with capture_logs() as told:
        build(spec, one_rank)
    assert [(line["log_level"], line["model_type"], line["reason"]) for line in told] == [
        ("warning", "llama", "its output layer has an adapter")
    ]

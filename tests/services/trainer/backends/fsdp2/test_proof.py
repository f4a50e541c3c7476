"""The proof notices what makes packed sequences another model, and nothing else."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from services.trainer.backends.fsdp2.attention import FLASH2, SEGMENTS
from services.trainer.backends.fsdp2.proof.packed import LENGTHS, Proof, prove
from services.trainer.backends.fsdp2.proof.tiny import WINDOW, set_noise, tiny

PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4},
    "gemma3_text": {"num_hidden_layers": 34, "hidden_size": 2560, "rope_parameters": None},
    "deepseek_v3": {},
    "llama": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
}
"""Entries of published sizes beside the defaults, which are of published models too."""


def proof_of(kind: str, implementation: str = SEGMENTS, **entries: Any) -> Proof:
    config = AutoConfig.for_model(kind, **entries)
    set_noise(config, 0.0)
    return prove(AutoModelForCausalLM._model_mapping[type(config)], config, implementation)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_sizes_are_made_small_and_hold(kind: str) -> None:
    config = AutoConfig.for_model(kind, **PUBLISHED[kind])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny(config))
    assert sum(parameter.numel() for parameter in model.parameters()) < 30_000_000
    assert proof_of(kind, **PUBLISHED[kind]).holds


def test_every_kind_of_layer_stays() -> None:
    config = AutoConfig.for_model("gemma3_text")
    small = tiny(config)
    assert set(small.layer_types) == {"sliding_attention", "full_attention"}
    assert small.sliding_window == WINDOW < max(LENGTHS)
    assert small.head_dim == config.head_dim and small.rope_parameters == config.rope_parameters


def test_keywords_that_are_left_out_are_named() -> None:
    entries = {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}
    proof = proof_of("gemma2", **entries)
    assert not proof.holds and proof.nats > 0.01 and proof.left_out == ("softcap",)
    assert proof_of("gemma2", FLASH2, **entries).holds
    assert proof_of("gpt_oss").left_out == ("s_aux",) == proof_of("gpt_oss", FLASH2).left_out


def test_layers_that_lose_the_borders_are_named() -> None:
    assert proof_of("stablelm").failure == "StableLmAttention does not tell its attention where sequences begin"


def test_rotary_positions_by_the_longest_sequence_show() -> None:
    """They are told by name before; the proof would notice others of their kind."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    proof = proof_of("qwen3", rope_parameters=dynamic, max_position_embeddings=16)
    assert not proof.holds and proof.nats > 0.01


def test_noise_that_the_router_needs_shows() -> None:
    """phimoe's router cuts by `router_jitter_noise` in generation too; training goes without noise."""
    assert not proof_of("phimoe").holds
    assert proof_of("mixtral", router_jitter_noise=0.1).holds


class Deaf(PreTrainedModel):
    """A model whose tokens do not depend on those before them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embedding = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **unused: Any) -> Any:
        return type("Output", (), {"logits": self.embedding(input_ids)})


def test_a_comparison_that_shows_nothing_is_no_proof() -> None:
    assert "would show nothing" in prove(Deaf, AutoConfig.for_model("qwen2"), "eager").failure


def test_random_numbers_of_the_caller_stay() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    proof_of("qwen2", rms_norm_eps=3e-6)
    assert torch.equal(torch.rand(3), expected)

"""FLOPs of training against torch's counter on the meta device.

The counter counts every product of the whole square of a sequence; the formula counts the pairs that the causal mask,
or the window, allows. So the formula's pairs are taken as whole squares here, and tests/test_sequence_cost.py counts
the pairs.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from millrace.megatron.architectures import read_shape
from millrace.megatron.architectures import shape as megatron
from millrace.sequence_cost import SequenceCost
from services.trainer.backends.fsdp2 import attention, flops
from services.trainer.backends.fsdp2.computable import check_computable
from tests.megatron import configs
from tests.services.trainer.backends.fsdp2.test_computable import EXPERTS, HEADS, LATENTS, RIGHT, SIZES

WHOLE = "whole_square"


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **unused: Any
) -> tuple[Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    return ((query @ key.transpose(2, 3)).softmax(-1) @ value).transpose(1, 2), None


AttentionInterface.register(WHOLE, attend)


def model_of(config: Any, implementation: str = WHOLE) -> Any:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    model.config.pad_token_id = None  # models that have one look for it in the tokens, which have no values here
    return model


def counted(model: Any, tokens: int) -> int:
    """FLOPs of one sequence, forward and backward. Experts are computed for the tokens that are sent to them."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        ids = torch.zeros(1, tokens, dtype=torch.long)
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    return int(counter.get_total_flops())


def of_whole_squares(cost: SequenceCost, tokens: int) -> float:
    pairs = cost.per_token_pair + sum(width for _, width in cost.windows)
    return cost.per_token * tokens + 2 * pairs * tokens * tokens


KINDS: dict[str, dict[str, Any]] = {
    **RIGHT,
    "glm4_moe_lite": {**LATENTS, **EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 48},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "laguna": {**HEADS, **EXPERTS, "num_experts": 4, "num_attention_heads_per_layer": [4, 8]},
    "starcoder2": {"sliding_window": 8},
}


@pytest.mark.parametrize("tokens", [4096, 32768])
@pytest.mark.parametrize("kind", KINDS)
def test_as_torch_counts(kind: str, tokens: int) -> None:
    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})
    model = model_of(config)
    cost = flops.sequence_cost(config, model)
    assert of_whole_squares(cost, tokens) == pytest.approx(counted(model, tokens), rel=1e-3)


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "olmo3", "cohere2", "starcoder2"])
def test_windows_are_those_that_attention_is_told(kind: str) -> None:
    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})
    told: list[int | None] = []

    def listening(*tensors: Any, sliding_window: int | None = None, **unused: Any) -> tuple[Tensor, None]:
        told.append(sliding_window)
        return attend(*tensors)

    AttentionInterface.register("listening", listening)
    model = model_of(config, "listening")
    with torch.device("meta"):
        model(input_ids=torch.zeros(1, 16, dtype=torch.long), use_cache=False)
    assert [layer.window for layer in flops.attention_layers(config)] == told
    assert 8 in told


PUBLISHED = ("QWEN2", "QWEN3_8B", "QWEN3_30B_A3B", "MIXTRAL", "DEEPSEEK_V3", "MOONLIGHT")


@pytest.mark.parametrize("name", PUBLISHED)
def test_both_backends_have_the_same_numbers(name: str, tmp_path: Any) -> None:
    """Models of their published sizes, with six layers; also as critics."""
    stated = {**getattr(configs, name), "num_hidden_layers": 6}
    config = AutoConfig.for_model(stated["model_type"], **{k: v for k, v in stated.items() if k != "model_type"})
    config.save_pretrained(tmp_path)
    shape, model = read_shape(tmp_path), model_of(config)
    cost = megatron.sequence_cost(shape)
    assert flops.sequence_cost(config, model) == cost
    for tokens in (4096, 32768):
        assert of_whole_squares(cost, tokens) == pytest.approx(counted(model, tokens), rel=1e-3)
    with torch.device("meta"):
        score = torch.nn.Linear(shape.hidden, 1, bias=False)
    assert flops.sequence_cost(config, model.base_model, score) == megatron.sequence_cost(shape.as_critic())


OTHERS = {
    "hrm_text": "it runs its layers several times",
    "mllama": "its layers for images are not run for text",
    "phi4_multimodal": "its adapters for images and sound are not run for text",
}
"""Accepted architectures of which the formula counts more or less than is computed."""


@pytest.mark.matrix  # test_as_torch_counts covers each kind of layer
@pytest.mark.timeout(600)
def test_as_torch_counts_for_all_that_the_backend_accepts() -> None:
    """Every language model of transformers with the sizes of its default config, as far as it can run on the meta
    device."""
    compared, wrong = set(), {}
    for made in AutoModelForCausalLM._model_mapping:
        try:
            config = made(num_hidden_layers=2)  # type: ignore[call-arg]
            check_computable(model_of(config, attention.SEGMENTS), attention.SEGMENTS, "", "")
            model = model_of(config)
            found = counted(model, 4096)
        except Exception:
            continue  # refused, without a default that can be built, or with a step that meta tensors cannot take
        compared.add(config.model_type)
        share = of_whole_squares(flops.sequence_cost(config, model), 4096) / found
        if abs(share - 1) > 1e-3:
            wrong[config.model_type] = share
    assert wrong.keys() <= OTHERS.keys(), wrong
    assert len(compared) >= 60

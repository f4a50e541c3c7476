"""Parameters of adapters, beside those of the adapters that Megatron's ranks hold."""

import json
import math
from pathlib import Path

import pytest

from millrace.backends.megatron import MegatronOptions
from millrace.lora import AskedAdapter
from millrace.megatron.adapters import adapted_linears, adapter_layout, choose_layers, linear_layers
from millrace.megatron.architectures import read_shape
from millrace.megatron.architectures.published import shape_of
from millrace.megatron.architectures.shape import ModelShape
from millrace.megatron.topology import Topology
from millrace.megatron.weights import TRANSFORMER_ENGINE, layout
from millrace.memory.adapters import active_adapter_parameters, adapter_layers, adapter_parameters
from millrace.memory.ledger import Part, Phase
from millrace.memory.prediction import predict
from millrace.spec.lora import Lora
from tests.megatron.test_weights import CONFIGS
from tests.memory.jobs import cut, job

ALL, EXPERTS = {"target_modules": "all-linear"}, {"target_modules": ["experts", "q_proj", "o_proj"]}
LATENT = [f"linear_{name}_proj" for name in ("kv_down", "kv_up", "q_down", "q_up", "q")]
PAGE = {"target_modules": ["linear_qkv", *LATENT, "linear_proj", "linear_fc1", "linear_fc2"]}
"""Both lists of verl's page: they mean every linear layer, those of experts too."""
FIRST = {"target_modules": ["linear_fc1", "o_proj"]}
BILLION = 1e9


def held(shape: ModelShape, options: MegatronOptions, lora: Lora) -> int:
    """Parameters of the adapters on Megatron's first rank."""
    linear, of_experts = (linear_layers(shape, TRANSFORMER_ENGINE, experts=experts) for experts in (False, True))
    chosen = {
        "all-linear": frozenset(linear),
        "experts": frozenset([*of_experts, *(name for name in linear if name.endswith((".q_proj", ".o_proj")))]),
        "linear_qkv": frozenset([*linear, *of_experts]),
        "linear_fc1": frozenset(
            [name for name in linear if name.endswith(("gate_proj", "up_proj", "o_proj"))]
            + [name for name in of_experts if not name.endswith(("down_proj", "w2"))]
        ),
    }["all-linear" if isinstance(lora.target_modules, str) else lora.target_modules[0]]
    if lora.target_modules[0] != "experts":  # the model may have none
        assert chosen == choose_layers(AskedAdapter.of(lora), shape, TRANSFORMER_ENGINE)
    size = max(1, options.tensor_parallel, options.expert_parallel * options.expert_tensor_size)
    places = layout(shape, Topology(size, options), 0, TRANSFORMER_ENGINE)
    chunks = adapter_layout(adapted_linears(places, chosen), 5)
    return sum(math.prod(placement.shape) for chunk in chunks for placement in chunk.values())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("asked", [ALL, EXPERTS, PAGE, FIRST], ids=["all-linear", "experts", "page", "fc1"])
@pytest.mark.parametrize("split", [{}, {"tensor_parallel": 2}, {"expert_parallel": 2}], ids=str)
def test_as_many_are_counted_as_a_rank_has(
    name: str, asked: dict[str, object], split: dict[str, int], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    shape = read_shape(tmp_path)
    options = MegatronOptions.model_validate(split if shape.experts is not None else {**split, "expert_parallel": 1})
    lora = Lora.model_validate({"rank": 5, "merge": True, **asked})
    layers = adapter_layers(shape, lora, ranks=options.tensor_parallel, expert_ranks=options.expert_tensor_size)
    counted = sum(layer.dense + layer.experts / options.expert_parallel for layer in layers)
    assert counted == held(shape, options, lora)


def test_adapters_of_all_experts_are_most_of_a_large_models_adapters() -> None:
    shape = shape_of("qwen3-30b-a3b")
    lora = Lora(rank=32, target_modules=["experts"], merge=True)
    assert (
        adapter_parameters(shape, lora) == 48 * 128 * 3 * 32 * (2048 + 768) == pytest.approx(1.66 * BILLION, rel=0.01)
    )
    spec = job("megatron", {"expert_parallel": 8}, lora=lora.model_dump())
    adapter = predict(spec, shape, 8)[Phase.UPDATE].device[Part.ADAPTER]
    assert adapter == (2 + 4 + 12) * adapter_parameters(shape, lora) / 8  # each rank has an eighth of the experts
    assert active_adapter_parameters(shape, lora) == adapter_parameters(shape, lora) * 8 / 128
    some = Lora(rank=32, target_modules=["experts.3.up_proj", "layers.0.mlp.experts.7.down_proj"])
    assert adapter_parameters(shape, some) == (48 + 1) * 32 * (2048 + 768)


def test_names_mean_what_they_mean_in_the_trainer() -> None:
    """A whole name, or an end of one that begins after a dot."""
    shape = cut("qwen3-8b", 12)
    everything, key = adapter_parameters(shape, Lora(rank=8)), 8 * (4096 + 1024)
    for excluded, without in (
        ("k_proj", 12 * key),
        ("model.layers.0.self_attn.k_proj", key),
        ("layers.1.self_attn.k_proj", key),
        ("proj", 0),
    ):
        assert adapter_parameters(shape, Lora(rank=8, exclude_modules=[excluded])) == everything - without, excluded
    assert adapter_parameters(shape, Lora(rank=8, target_modules=["layers.11.self_attn.k_proj"])) == key
    with_head = Lora(rank=8, target_modules=["lm_head", "layers.11.self_attn.k_proj"])
    assert adapter_parameters(shape, with_head) == key + 8 * (4096 + shape.vocabulary)
    fused = Lora(rank=8, target_modules=["linear_qkv"], exclude_modules=["q_proj"])
    assert adapter_parameters(shape, fused) == 12 * 2 * key

"""Mixtral: every layer has experts, whose tensors have Mixtral's own names."""

from collections.abc import Mapping
from typing import Any

from millrace.megatron.architectures.reading import refuse_unless, sizes
from millrace.megatron.architectures.shape import ExpertShape, ModelShape, Names

NAMES = Names(
    router="block_sparse_moe.gate.weight",
    expert_gate="block_sparse_moe.experts.{expert}.w1.weight",
    expert_up="block_sparse_moe.experts.{expert}.w3.weight",
    expert_down="block_sparse_moe.experts.{expert}.w2.weight",
)


def shape(config: Mapping[str, Any]) -> ModelShape:
    refuse_unless(config, "sliding_window", None)
    refuse_unless(config, "router_jitter_noise", 0.0)
    experts = ExpertShape(
        count=config["num_local_experts"],
        per_token=config["num_experts_per_tok"],
        ffn=config["intermediate_size"],
        layers=(True,) * config["num_hidden_layers"],
    )
    return ModelShape(architecture="mixtral", experts=experts, names=NAMES, **sizes(config, theta=1e6))

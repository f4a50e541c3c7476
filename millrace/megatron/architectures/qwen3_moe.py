"""Qwen3-MoE (30B-A3B, 235B-A22B): Qwen3's attention and experts, without shared experts."""

from collections.abc import Mapping
from typing import Any

from millrace.megatron.architectures.reading import refuse_unless, sizes
from millrace.megatron.architectures.shape import ExpertShape, ModelShape


def shape(config: Mapping[str, Any]) -> ModelShape:
    refuse_unless(config, "use_sliding_window", False)
    refuse_unless(config, "attention_bias", False)
    dense, every = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    experts = ExpertShape(
        count=config["num_experts"] if "num_experts" in config else config["num_local_experts"],
        per_token=config["num_experts_per_tok"],
        ffn=config["moe_intermediate_size"],
        layers=tuple(i not in dense and (i + 1) % every == 0 for i in range(config["num_hidden_layers"])),
        normalised=bool(config.get("norm_topk_prob", False)),
    )
    return ModelShape(architecture="qwen3_moe", query_key_norm=True, experts=experts, **sizes(config))

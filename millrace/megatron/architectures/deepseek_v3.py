"""DeepSeek-V3 and Moonlight: latent attention, sigmoid routing with a balancing bias, shared experts. Their layers for
multi-token prediction are not loaded."""

from collections.abc import Mapping
from typing import Any

from millrace.differences import other_latent_norms
from millrace.errors import InvalidJob
from millrace.megatron.architectures.reading import refuse_unless, rope, sizes
from millrace.megatron.architectures.shape import ExpertShape, LatentAttention, ModelShape


def shape(config: Mapping[str, Any]) -> ModelShape:
    refuse_unless(config, "attention_bias", False)
    refuse_unless(config, "rope_interleave", True)
    if reason := other_latent_norms("Megatron-Core", {**config, "model_type": "deepseek_v3"}):
        raise InvalidJob(f"model.path: {reason}.", "use trainer.backend fsdp2.")
    latent = LatentAttention(
        query_rank=config["q_lora_rank"],
        key_value_rank=config["kv_lora_rank"],
        plain_dim=config["qk_nope_head_dim"],
        rotary_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
    )
    common = sizes({**config, "rope_parameters": None, "rope_scaling": None})
    common |= {"rope": rope(config, ("default", "yarn")), "key_value_heads": common["heads"]}
    return ModelShape(architecture="deepseek_v3", latent=latent, experts=_experts(config), **common)


def _experts(config: Mapping[str, Any]) -> ExpertShape:
    refuse_unless(config, "norm_topk_prob", True)
    refuse_unless(config, "scoring_func", "sigmoid")
    refuse_unless(config, "topk_method", "noaux_tc")
    per_token, groups = config["num_experts_per_tok"], config["n_group"] or 1
    chosen = config["topk_group"] or 1
    if groups > 1 and per_token // chosen != 2:
        raise InvalidJob(
            f"model.path: groups of experts are ranked by their best 2, the megatron backend would take the best "
            f"{per_token} // {chosen} = {per_token // chosen}.",
            "use trainer.backend fsdp2.",
        )
    layers, dense, every = config["num_hidden_layers"], config["first_k_dense_replace"], config.get("moe_layer_freq", 1)
    shared = config["n_shared_experts"]
    return ExpertShape(
        count=config["n_routed_experts"],
        per_token=per_token,
        ffn=config["moe_intermediate_size"],
        layers=tuple(layer >= dense and layer % every == 0 for layer in range(layers)),
        shared_ffn=config["moe_intermediate_size"] * shared if shared else None,
        score="sigmoid",
        bias=True,
        scaling=config["routed_scaling_factor"],
        groups=groups if groups > 1 else None,
        groups_per_token=chosen if groups > 1 else None,
    )

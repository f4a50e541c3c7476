"""Published shapes as model folders have them."""

from typing import Any

from millrace.megatron.architectures.published import QWEN2_5_VL_TOWER
from millrace.megatron.architectures.shape import ModelShape

WITH_TOWER: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "vision_config": QWEN2_5_VL_TOWER,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "image_token_id": 151655,
    "video_token_id": 151656,
}
"""Entries of the config of Qwen2.5-VL-7B that models of text do not have."""


def config_of(shape: ModelShape) -> dict[str, Any]:
    """The config.json of the shape."""
    config: dict[str, Any] = {
        "model_type": shape.architecture,
        "architectures": ["Qwen3MoeForCausalLM" if shape.experts else "Qwen3ForCausalLM"],
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rope.theta,
        "tie_word_embeddings": shape.tied,
        "attention_bias": False,
        "use_sliding_window": False,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": shape.layers,
        "torch_dtype": "bfloat16",
    }
    if shape.tower is not None:
        config |= WITH_TOWER
    if shape.experts is not None:
        config |= {
            "num_experts": shape.experts.count,
            "num_experts_per_tok": shape.experts.per_token,
            "moe_intermediate_size": shape.experts.ffn,
            "norm_topk_prob": shape.experts.normalised,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config

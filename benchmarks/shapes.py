"""Published shapes as model folders have them."""

from typing import Any

from millrace.megatron.architectures.shape import ModelShape


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

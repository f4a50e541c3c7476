"""Tiny random models whose layers are GatedDeltaNet beside full attention, as their folders are published."""

from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 259
LAYERS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": len(LAYERS),
    "layer_types": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
IN_THREE = {"rope_parameters": {**ROTARY, "mrope_section": [2, 1, 1], "mrope_interleaved": True}}
TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
TOKENS = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
KINDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
"""Of these the last two have a tower for images beside the language model."""


def built(kind: str) -> Any:
    """The model with the values that transformers gives it."""
    if kind == "qwen3_next":
        config = transformers.Qwen3NextConfig(**SIZES, **EXPERTS, rope_parameters=ROTARY)
        return transformers.Qwen3NextForCausalLM(config)
    name = "Qwen3_5Moe" if "moe" in kind else "Qwen3_5"
    text = {**SIZES, **IN_THREE, **(EXPERTS if "moe" in kind else {})}
    if kind.endswith("text"):
        return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}TextConfig")(**text))
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=TOWER, **TOKENS)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


@torch.no_grad()
def save_hybrid_model(folder: Path, kind: str, seed: int = 0) -> Path:
    """Random values in all tensors, and large enough ones that a token notices those before it."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = built(kind)
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.15)
            elif name.endswith("A_log"):
                parameter.uniform_(-2, 1)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    return folder

"""Published shapes as model folders have them, cut or whole, and folders with random weights."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from millrace.megatron.architectures.published import QWEN2_5_VL_TOWER
from millrace.megatron.architectures.shape import ModelShape
from millrace.spec import JobSpec, parse

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


def trainer_spec(folder: Path, *, lora: dict[str, Any] | None = None, **trainer: Any) -> JobSpec:
    """A job of which the trainer alone is run: on the model in `folder`, with these fields of `trainer`."""
    return parse(
        {
            "name": "bench",
            "output": "/unused",
            "model": {"path": str(folder), "lora": lora},
            "data": {"procedural": "reasoning_gym:spell_backward", "max_prompt_tokens": 1},
            "rollout": {"max_response_tokens": 8},
            "trainer": trainer,
        }
    )


def cut(shape: ModelShape, layers: int | None, vocabulary: int | None = None) -> ModelShape:
    """The shape with its first `layers` layers and with another vocabulary; None and 0: as they are."""
    layers = layers or shape.layers
    experts = shape.experts and replace(shape.experts, layers=shape.experts.layers[:layers])
    return replace(shape, layers=layers, experts=experts, vocabulary=vocabulary or shape.vocabulary)


def random_model(folder: Path, config: dict[str, Any], dtype: str = "bfloat16") -> int:
    """Makes a Hugging Face folder of this config with random weights, drawn on the GPU if there is one, and with the
    demo's tokenizer. Returns the number of parameters."""
    import torch
    import transformers

    from millrace.demo.tokenizer import byte_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model_class = getattr(transformers, config["architectures"][0])
        read = transformers.AutoConfig.from_pretrained(folder)
        model = model_class._from_config(read, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    count = int(model.num_parameters())
    del model
    torch.cuda.empty_cache()  # for the processes that share the GPU
    return count

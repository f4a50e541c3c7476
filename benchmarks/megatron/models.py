"""The models that are measured: published shapes with fewer layers, and small models whose results are compared."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.shapes import config_of, cut
from millrace.megatron.architectures.published import shape_of
from millrace.megatron.placement import Placement

LAPTOP = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
"""Sizes that replace those of a shape on a host without a GPU, to try the program."""


def shape_folder(root: Path, name: str, layers: int, *, laptop: bool) -> Path:
    """A folder with a config only, for `draw_weights`."""
    config = config_of(cut(shape_of(name), layers))
    if laptop:
        config |= {key: value for key, value in LAPTOP.items() if key in config}
    folder = root / f"{name}-{layers}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def draw_weights() -> None:
    """The megatron backend draws weights instead of reading a folder and checking what it stores."""
    from services.trainer.backends.megatron import backend

    backend.read = random_weights  # type: ignore[attr-defined]
    backend.check_whole_folder = lambda *_, **__: None  # type: ignore[attr-defined]


def random_weights(
    folder: Path, layout: Mapping[str, Placement], dtype: torch.dtype, weights: Path | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Replaces reading a folder: 8 billion numbers are drawn faster than read."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, placement in layout.items():
        drawn = torch.empty(placement.shape, dtype=dtype, device=device)
        if len(placement.shape) > 1:
            drawn.normal_(0.0, 0.02)
        else:
            drawn.fill_(0.0 if name.endswith("bias") else 1.0)
        yield name, drawn


def small_model(kind: str, folder: Path, *, laptop: bool) -> None:
    """A model folder of random float32 weights, large enough for Transformer Engine's kernels."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3Config, Qwen3MoeConfig

    scale = 1 if laptop else 4
    sizes: dict[str, Any] = {
        "vocab_size": 1024 * scale,
        "hidden_size": 128 * scale,
        "intermediate_size": 256 * scale,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    experts: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64 * scale, "norm_topk_prob": True}
    config: Any
    match kind:
        case "dense":
            config = Qwen3Config(**sizes, head_dim=16 * scale, tie_word_embeddings=False)
        case "moe":
            heads: dict[str, Any] = {"head_dim": 16 * scale}
            config = Qwen3MoeConfig(**sizes, **experts, **heads, num_experts=8, tie_word_embeddings=False)
        case "latent":
            latent: dict[str, Any] = {
                "kv_lora_rank": 64,
                "q_lora_rank": 96,
                "qk_nope_head_dim": 64,
                "qk_rope_head_dim": 32,
            }
            routed: dict[str, Any] = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
            own: dict[str, Any] = {"v_head_dim": 64, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
            sizes |= {"num_key_value_heads": 8, "tie_word_embeddings": False}
            config = DeepseekV3Config(**sizes, **experts, **latent, **routed, **own)
        case _:
            raise ValueError(kind)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "gate.weight" in name:
                parameter.normal_(0.0, 0.3)  # experts that differ much: few tokens are near a tie
            else:
                parameter.mul_(2.0)
    model.save_pretrained(folder)

"""Adapters with values of some size, as PEFT makes and stores them."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model


def with_adapter(model: Any, *, seed: int, rank: int, alpha: float, targets: str | Sequence[str] = "all-linear") -> Any:
    """A copy of `model` as a PEFT model whose adapter is drawn from `seed` and changes its distribution a lot."""
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")  # type: ignore[arg-type]
    adapted: Any = get_peft_model(copy.deepcopy(model), config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(adapted.named_parameters()):
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return adapted


def published(adapted: Any) -> dict[str, torch.Tensor]:
    """The adapter's tensors as they are published: stored names, B multiplied by the scale, the model's dtype."""
    config = adapted.peft_config["default"]
    dtype, scale = next(adapted.parameters()).dtype, config.lora_alpha / config.r
    return {
        name.replace(".default.", "."): (p * (scale if "lora_B" in name else 1.0)).detach().to(dtype).contiguous()
        for name, p in adapted.named_parameters()
        if "lora_" in name
    }


def merged(adapted: Any) -> Any:
    """The model with the adapter merged into its weights."""
    return copy.deepcopy(adapted).merge_and_unload()

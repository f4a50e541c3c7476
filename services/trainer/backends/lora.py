"""What the backends share of LoRA: the adapter that a job asks for, and its first values."""

import hashlib
import math
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from millrace.errors import refused
from millrace.spec.lora import Lora, folder_names
from services.trainer.protocol.adapter import AdapterSettings

FIELD = "model.lora"
WEIGHTS = "adapter_model.safetensors"


def configuration(lora: Lora) -> LoraConfig:
    """The adapter that the job asks for: as `lora` says, or as the folder `lora.adapter_path` does. Its layers have the
    names of the model folder. Raises InvalidJob."""
    if lora.adapter_path is None:
        return LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]  # any number works, and PEFT reads and writes any
            lora_dropout=lora.dropout,
            target_modules="all-linear" if lora.target_modules == "all-linear" else folder_names(lora.target_modules),
            exclude_modules=folder_names(lora.exclude_modules) or None,
            use_rslora=lora.rslora,
            use_dora=lora.dora,
            init_lora_weights="gaussian" if lora.init == "gaussian" else True,
            task_type="CAUSAL_LM",
        )
    field, fix = f"{FIELD}.adapter_path", "give a folder that PEFT wrote: adapter_config.json and safetensors."
    try:
        config = LoraConfig.from_pretrained(lora.adapter_path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise refused(field, lora.adapter_path, f"it cannot be read: {error}", fix) from error
    if not isinstance(config, LoraConfig) or config.bias != "none" or config.rank_pattern or config.alpha_pattern:
        reason = "it is not an adapter of LoRA with one rank for all layers and without biases"
        raise refused(field, lora.adapter_path, reason, fix)
    for name, found in (("rank", config.r), ("alpha", config.lora_alpha)):
        if name in lora.model_fields_set and getattr(lora, name) != found:
            reason = f"the adapter in {lora.adapter_path} has {found}"
            raise refused(f"{FIELD}.{name}", getattr(lora, name), reason, "leave it out.")
    if config.use_dora and not lora.merge:
        reason = f"engines cannot serve DoRA, which the adapter in {lora.adapter_path} is"
        raise refused(f"{FIELD}.merge", False, reason, "set it to true.")
    config.lora_dropout, config.inference_mode = lora.dropout, False
    return config


def settings_of(config: LoraConfig) -> AdapterSettings:
    """How the adapters of this configuration are added to their weights."""
    return AdapterSettings(config.r, float(config.lora_alpha), config.use_rslora, config.use_dora)


def target_names(chosen: Collection[str], others: Collection[str]) -> list[str]:
    """`target_modules` of a PEFT folder with adapters for the layers `chosen`: the last parts of their names, or the
    whole names where one of the model folder's `others` ends like a chosen one."""
    short = {layer.rpartition(".")[2] for layer in chosen}
    ambiguous = any(other.rpartition(".")[2] in short for other in others)
    return sorted(chosen if ambiguous else short)


def first_a(name: str, shape: tuple[int, ...], config: LoraConfig, seed: int) -> Tensor:
    """PEFT's first values of a matrix A, float32 of `shape` [rank, in]. They are drawn from the seed and the name that
    the matrix has in a PEFT folder: every backend and every rank draws the same."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    value = torch.zeros(shape)
    if config.init_lora_weights == "gaussian":
        return value.normal_(0.0, 1 / config.r, generator=generator)
    return nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)


def stored_values(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors of a PEFT folder by name, float32. Raises InvalidJob where they are not those of `shapes`."""
    field, fix = f"{FIELD}.adapter_path", "give an adapter of this model."
    try:
        stored = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise refused(field, str(folder), f"{WEIGHTS} cannot be read: {error}", fix) from error
    for name, shape in shapes.items():
        if name not in stored or tuple(stored[name].shape) != shape:
            raise refused(field, str(folder), f"its {name} should have shape {shape}", fix)
    if unknown := stored.keys() - shapes.keys():
        raise refused(field, str(folder), f"it has {min(unknown)}, which this model has no layer for", fix)
    return {name: tensor.float() for name, tensor in stored.items()}

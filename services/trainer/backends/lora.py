"""What the backends share of LoRA: the adapter that a job asks for, and its first values."""

import hashlib
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from millrace.errors import refused
from millrace.lora import FIELD, WEIGHTS, AskedAdapter
from millrace.spec.lora import Lora
from services.trainer.protocol.adapter import AdapterSettings

if TYPE_CHECKING:
    from peft import LoraConfig


def configuration(lora: Lora) -> "LoraConfig":
    """The adapter that the job asks for, without its layers. Raises InvalidJob for a folder that cannot be used."""
    from peft import LoraConfig  # takes seconds, which jobs without an adapter do not wait

    options = AskedAdapter.of(lora).options
    return LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,  # type: ignore[arg-type]  # any number works, and PEFT reads and writes any
        lora_dropout=options.dropout,
        use_rslora=options.rslora,
        use_dora=options.dora,
        init_lora_weights="gaussian" if options.init == "gaussian" else True,
        task_type="CAUSAL_LM",
    )


def settings_of(config: "LoraConfig") -> AdapterSettings:
    """How the adapters of this configuration are added to their weights."""
    return AdapterSettings(config.r, float(config.lora_alpha), config.use_rslora, config.use_dora)


def target_names(chosen: Collection[str], others: Collection[str]) -> list[str]:
    """`target_modules` of a PEFT folder with adapters for the layers `chosen`: the last parts of their names, or the
    whole names if one of the model folder's `others` ends like a chosen one."""
    short = {layer.rpartition(".")[2] for layer in chosen}
    ambiguous = any(other.rpartition(".")[2] in short for other in others)
    return sorted(chosen if ambiguous else short)


def first_a(name: str, shape: tuple[int, ...], init: str, seed: int) -> Tensor:
    """First values of a matrix A by `model.lora.init`, float32 of `shape` [rank, in]: PEFT's, or Glorot's. They are
    drawn from the seed and the name that the matrix has in a PEFT folder: every backend and every rank draws the
    same."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    value = torch.zeros(shape)
    if init == "gaussian":
        return value.normal_(0.0, 1 / shape[0], generator=generator)
    if init == "xavier":
        return nn.init.xavier_normal_(value, generator=generator)
    return nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)


def stored_values(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors of a PEFT folder by name, float32. Raises InvalidJob if they are not those of `shapes`."""
    fix = "give an adapter of this model."
    try:
        stored = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise refused(FIELD, str(folder), f"{WEIGHTS} cannot be read: {error}", fix) from error
    for name, shape in shapes.items():
        if name not in stored or tuple(stored[name].shape) != shape:
            raise refused(FIELD, str(folder), f"its {name} should have shape {shape}", fix)
    if unknown := stored.keys() - shapes.keys():
        raise refused(FIELD, str(folder), f"it has {min(unknown)}, which this model has no layer for", fix)
    return {name: tensor.float() for name, tensor in stored.items()}

"""LoRA by PEFT's layers: the parameters of the model folder are frozen, and only the adapters are trained."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from millrace.errors import refused
from millrace.spec.lora import Lora
from millrace.spec.model import Model
from services.trainer.backends.fsdp2.adapted import BASE, is_adapter
from services.trainer.backends.fsdp2.model import Sharding, build_unfilled, read_whole, shard_model
from services.trainer.backends.lora import FIELD, first_a, stored_values
from services.trainer.protocol.adapter import LORA_A, MAGNITUDE, stored_name

ROUTERS = ("router", "gate")
"""Last parts of the names of layers that send tokens to experts. They are never adapted."""


def inject(module: PreTrainedModel, config: LoraConfig) -> None:
    """Adds adapters, float32, to the layers that `config` names, and freezes every other parameter. Raises
    InvalidJob where there is no such layer, or one that is not linear."""
    asked = config.target_modules
    linear = {name for name, part in module.named_modules() if type(part) is nn.Linear}
    routers = {name for name in linear if name.rpartition(".")[2] in ROUTERS}
    config.exclude_modules = [*(config.exclude_modules or ()), *sorted(routers)] or None
    if asked == "all-linear":  # PEFT's own choice has the fused weights of experts, too
        head = module.get_output_embeddings()
        config.target_modules = [name for name in linear - routers if module.get_submodule(name) is not head]
    try:
        inject_adapter_in_model(config, module)
    except ValueError as error:
        known = sorted({name.rpartition(".")[2] for name in linear - routers})
        fix = f'name some of {", ".join(known)}, or write "all-linear".'
        raise refused(f"{FIELD}.target_modules", asked, str(error), fix) from error
    tied = {id(parameter) for parameter in module.get_input_embeddings().parameters()}
    for name, part in module.named_modules():
        if isinstance(part, BaseTunerLayer) and (
            type(part) is not Linear
            or type(part.get_base_layer()) is not nn.Linear
            or id(part.get_base_layer().weight) in tied
        ):
            reason = f"{name} is not a linear layer with a weight of its own"
            raise refused(f"{FIELD}.target_modules", asked, reason, "leave it out.")
    for name, parameter in module.named_parameters():
        adapter = is_adapter(name)
        if adapter:
            parameter.data = parameter.data.float()
        parameter.requires_grad_(adapter)


def layers(module: nn.Module) -> dict[str, Linear]:
    """The layers that have an adapter, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, Linear)}


def source(
    module: nn.Module, loaded: Mapping[str, Tensor], config: LoraConfig, lora: Lora, seed: int
) -> dict[str, Tensor]:
    """What a module with adapters is filled from: `loaded`, the tensors of the model without adapters, by the names
    that they have in `module`, and the adapters' first values. Raises InvalidJob."""
    names: dict[str, str] = {}
    for layer in layers(module):
        names |= {f"{layer}.{kind}": f"{layer}.base_layer.{kind}" for kind in ("weight", "bias")}
    filled = {names.get(name, name): tensor for name, tensor in loaded.items()}
    if lora.adapter_path is None:
        return {**filled, **_initial(module, filled, config, seed)}
    return {**filled, **_stored(module, Path(lora.adapter_path))}


@torch.no_grad()
def _initial(module: nn.Module, filled: Mapping[str, Tensor], config: LoraConfig, seed: int) -> dict[str, Tensor]:
    """PEFT's first values, drawn from `seed`: with them the model computes the same as without adapters."""
    values: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if not is_adapter(name):
            continue
        if f".{LORA_A}." in name:
            values[name] = first_a(stored_name(name), tuple(parameter.shape), config, seed)
        elif f".{MAGNITUDE}." in name:
            weight_oi = filled[name.replace(f".{MAGNITUDE}.default.", BASE)]
            values[name] = torch.linalg.vector_norm(weight_oi.float(), dim=1)
        else:
            values[name] = torch.zeros(parameter.shape)
    return values


def _stored(module: nn.Module, folder: Path) -> dict[str, Tensor]:
    """The values in a PEFT folder. Raises InvalidJob where they are not those of the module's adapters."""
    parameters = {name: parameter for name, parameter in module.named_parameters() if is_adapter(name)}
    stored = stored_values(folder, {stored_name(name): tuple(p.shape) for name, p in parameters.items()})
    return {name: stored[stored_name(name)] for name in parameters}


def policy(model: Model, config: Any, adapter: LoraConfig, sharding: Sharding, seed: int) -> PreTrainedModel:
    """The language model with adapters, sharded and loaded. Frozen parameters have the dtype of the forward pass.
    Raises InvalidJob."""
    lora = model.lora
    assert lora is not None

    def build() -> PreTrainedModel:
        module = build_unfilled(AutoModelForCausalLM, model, config, sharding, dtype=sharding.compute)
        inject(module, adapter)
        return module

    def read(module: PreTrainedModel) -> dict[str, Tensor]:
        return source(
            module, read_whole(AutoModelForCausalLM, model, config, dtype=sharding.compute), adapter, lora, seed
        )

    return shard_model(build, read, sharding)

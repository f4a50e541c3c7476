"""LoRA by PEFT's layers: the parameters of the model folder are frozen, and only the adapters are trained."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.data.pictures import loader_of
from millrace.spec.lora import Lora
from millrace.spec.model import Model
from services.trainer.backends.fsdp2.adapted import BASE, choose_layers, stored_layers
from services.trainer.backends.fsdp2.loading import LocalPart, ModelFolder
from services.trainer.backends.fsdp2.model import FIELD as MODEL_FIELD
from services.trainer.backends.fsdp2.model import Sharding, build_unfilled, shard_model
from services.trainer.backends.lora import first_a, stored_values, target_names
from services.trainer.backends.tower import tower_layers
from services.trainer.protocol.adapter import LORA_A, MAGNITUDE, is_adapter, stored_name

PLAIN = "model"
"""Name of the whole model in the module that PEFT sees."""


def inject(module: PreTrainedModel, config: LoraConfig, lora: Lora) -> None:
    """Adds adapters, float32, to the layers that the job asks for, and freezes every other parameter. `config` gets the
    names of the layers as a PEFT folder stores them. Raises InvalidJob for names of layers that the model has not."""
    chosen = choose_layers(module, lora)
    others = stored_layers(module, without=chosen) | set(tower_layers(module))
    # PEFT takes the names of dense layers for those of fused experts in models whose `config` says that they have
    # experts. It sees a module without a config, and whole names.
    plain = nn.Module()
    plain.add_module(PLAIN, module)
    config.target_modules = [f"{PLAIN}.{name}" for name in chosen]
    inject_adapter_in_model(config, plain)
    config.target_modules = target_names(chosen, others)
    for name, parameter in module.named_parameters():
        adapter = is_adapter(name)
        if adapter:
            parameter.data = parameter.data.float()
        parameter.requires_grad_(adapter)


def layers(module: nn.Module) -> dict[str, Linear]:
    """The layers that have an adapter, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, Linear)}


@torch.no_grad()
def fill_adapters(module: nn.Module, lora: Lora, seed: int) -> None:
    """Gives this rank's part of every adapter its first values: drawn from `seed`, or those of the
    folder that the job names. The module's own weights are already there. Raises InvalidJob."""
    stored = {} if lora.adapter_path is None else _stored(module, Path(lora.adapter_path))
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        if not is_adapter(name):
            continue
        part = LocalPart.of(parameter)
        if stored:
            part.copy_from(stored[name])
        elif f".{LORA_A}." in name:
            part.copy_from(first_a(stored_name(name), tuple(parameter.shape), lora.init, seed))
        elif f".{MAGNITUDE}." in name:  # its rows are divided over the ranks as the weight's are
            rows_oi = LocalPart.of(parameters[name.replace(f".{MAGNITUDE}.default.", BASE)]).values
            part.values.copy_(torch.linalg.vector_norm(rows_oi.float(), dim=1))
        else:
            part.values.zero_()


def _stored(module: nn.Module, folder: Path) -> dict[str, Tensor]:
    """The values in a PEFT folder. Raises InvalidJob if they are not those of the module's adapters."""
    parameters = {name: parameter for name, parameter in module.named_parameters() if is_adapter(name)}
    stored = stored_values(folder, {stored_name(name): tuple(p.shape) for name, p in parameters.items()})
    return {name: stored[stored_name(name)] for name in parameters}


def policy(model: Model, config: Any, adapter: LoraConfig, sharding: Sharding, seed: int) -> PreTrainedModel:
    """The language model with adapters, sharded and loaded. Frozen parameters have the dtype of the forward pass.
    Raises InvalidJob."""
    lora = model.lora
    assert lora is not None

    def build() -> PreTrainedModel:
        module = build_unfilled(loader_of(config), model, config, sharding, dtype=sharding.compute)
        inject(module, adapter, lora)
        return module

    return shard_model(
        build,
        ModelFolder(loader_of(config), model, config, sharding.compute, MODEL_FIELD),
        sharding,
        fill_rest=lambda module: fill_adapters(module, lora, seed),
    )

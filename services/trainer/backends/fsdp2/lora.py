"""LoRA by PEFT's layers: the parameters of the model folder are frozen, and only the adapters are trained."""

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
from services.trainer.backends.fsdp2.loading.folder import ModelFolder
from services.trainer.backends.fsdp2.loading.local import LocalPart
from services.trainer.backends.fsdp2.model import FIELD as MODEL_FIELD
from services.trainer.backends.fsdp2.model import Sharding, build_unfilled, shard_model
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


@torch.no_grad()
def fill_adapters(module: nn.Module, config: LoraConfig, lora: Lora, seed: int) -> None:
    """Gives this rank's part of every adapter its first values: those of PEFT, drawn from `seed`, or those of the
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
            part.copy_from(first_a(stored_name(name), tuple(parameter.shape), config, seed))
        elif f".{MAGNITUDE}." in name:  # its rows are divided over the ranks as the weight's are
            rows_oi = LocalPart.of(parameters[name.replace(f".{MAGNITUDE}.default.", BASE)]).values
            part.values.copy_(torch.linalg.vector_norm(rows_oi.float(), dim=1))
        else:
            part.values.zero_()


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

    return shard_model(
        build,
        ModelFolder(AutoModelForCausalLM, model, config, sharding.compute, MODEL_FIELD),
        sharding,
        fill_rest=lambda module: fill_adapters(module, adapter, lora, seed),
    )

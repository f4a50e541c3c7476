"""LoRA by PEFT's layers: the parameters of the model folder are frozen, and only the adapters are trained."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from millrace.errors import InvalidJob, refused
from millrace.spec.lora import Lora
from millrace.spec.model import Model
from services.trainer.backends.fsdp2.adapted import BASE, is_adapter, stored_name
from services.trainer.backends.fsdp2.model import Sharding, build_unfilled, read_whole, shard_model
from services.trainer.protocol.adapter import LORA_A, MAGNITUDE, AdapterSettings

FIELD = "model.lora"
ROUTERS = ("router", "gate")
"""Last parts of the names of layers that send tokens to experts. They are never adapted."""
_WEIGHTS = "adapter_model.safetensors"


def configuration(lora: Lora) -> LoraConfig:
    """The adapter that the job asks for: as `lora` says, or as the folder `lora.adapter_path` does. Raises
    InvalidJob."""
    if lora.adapter_path is None:
        return LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]  # any number works, and PEFT reads and writes any
            lora_dropout=lora.dropout,
            target_modules=lora.target_modules,
            exclude_modules=lora.exclude_modules or None,
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
    config.lora_dropout, config.inference_mode = lora.dropout, False
    return config


def settings_of(config: LoraConfig) -> AdapterSettings:
    """How the adapters of this configuration are added to their weights."""
    return AdapterSettings(config.r, float(config.lora_alpha), config.use_rslora, config.use_dora)


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
    generator = torch.Generator().manual_seed(seed)
    values: dict[str, Tensor] = {}
    for name, parameter in sorted(module.named_parameters()):
        if not is_adapter(name):
            continue
        values[name] = value = torch.zeros(parameter.shape)
        if f".{LORA_A}." in name and config.init_lora_weights == "gaussian":
            value.normal_(0.0, 1 / config.r, generator=generator)
        elif f".{LORA_A}." in name:
            nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
        elif f".{MAGNITUDE}." in name:
            weight_oi = filled[name.replace(f".{MAGNITUDE}.default.", BASE)]
            torch.linalg.vector_norm(weight_oi.float(), dim=1, out=value)
    return values


def _stored(module: nn.Module, folder: Path) -> dict[str, Tensor]:
    """The values in a PEFT folder. Raises InvalidJob where they are not those of the module's adapters."""
    field, fix = f"{FIELD}.adapter_path", "give an adapter of this model."
    try:
        stored = load_file(folder / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise refused(field, str(folder), f"{_WEIGHTS} cannot be read: {error}", fix) from error
    values = {}
    for name, parameter in module.named_parameters():
        if not is_adapter(name):
            continue
        value = stored.pop(stored_name(name), None)
        if value is None or value.shape != parameter.shape:
            reason = f"its {stored_name(name)} should have shape {tuple(parameter.shape)}"
            raise refused(field, str(folder), reason, fix)
        values[name] = value.float()
    if stored:
        raise refused(field, str(folder), f"it has {next(iter(stored))}, which this model has no layer for", fix)
    return values


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


def check(lora: Lora | None, offload_reference: bool) -> None:
    """Raises InvalidJob for backend options that contradict LoRA."""
    if lora is not None and offload_reference:
        reason = "with model.lora the reference is the model without its adapter, and takes no memory"
        raise InvalidJob(f"trainer.backend_options.offload_reference: true: {reason}.", "leave it out.")

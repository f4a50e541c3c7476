"""A Hugging Face model sharded over the ranks: built without memory, then filled from its folder."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoConfig, PreTrainedModel

from millrace.data import quantization
from millrace.data.pictures import loader_of
from millrace.errors import InvalidJob
from millrace.spec.model import Model
from millrace.weights.folder_tensors import stored_shapes
from millrace.weights.loader.stored import follow_folder
from services.trainer.backends.fsdp2 import recurrent
from services.trainer.backends.fsdp2.computable import check_computable, named
from services.trainer.backends.fsdp2.loading import FIX, ModelFolder
from services.trainer.backends.fsdp2.proof.tiny import set_noise
from services.trainer.backends.fsdp2.sequence_parallel import SequenceGroup
from services.trainer.backends.fsdp2.sharded_model import Sums
from services.trainer.backends.tower import tower_blocks, with_tower, without_tower
from services.trainer.ranks import collectives

FIELD = "model.path"
_COMPILE_OPTIONS: dict[str, Any] = {"triton.mix_order_reduction": False}
"""Inductor chooses this fusion by the number of tokens: each range of micro-batch sizes would be compiled again, 10 s
each. The fusion saves about 1 % of an update."""
Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class Sharding:
    """How a module is sharded and computes."""

    mesh: DeviceMesh
    attention: str
    """Name of the attention implementation in transformers."""
    compute: torch.dtype
    sequence: SequenceGroup
    """The ranks that share each micro-batch."""
    offload: bool = False
    """Keep the shards in host memory and copy them to the device when they are needed."""
    compile: bool = False
    """Compile each decoder layer. Lengths are dynamic, so each kind of layer is compiled once."""
    with_tower: bool = False
    """The tower for images is a part of the module."""

    @property
    def sums(self) -> Sums:
        """How gradients are added up over the micro-batches of an update. Those that are not reduced at once stay on
        the device, so all are reduced at once if shards are in host memory."""
        if self.offload:
            return Sums.REDUCED
        if self.mesh.ndim > 1:
            return Sums.OWN_SHARD
        return Sums.WHOLE if self.mesh.size() == 1 else Sums.REDUCED


def load_config(model: Model, field: str = FIELD) -> Any:
    """The config of a model folder, without dropout and noise: a policy is trained with the probabilities with which it
    sampled. It is that of unquantized weights. `field` is the field of the job spec that names the folder. Raises
    InvalidJob."""
    folder = Path(model.path)
    if not (folder / "config.json").is_file():
        raise InvalidJob(
            f"{field}: {model.path} is not a Hugging Face model folder on the trainer's host: no config.json there.",
            "give a folder with config, tokenizer and safetensors that the trainer sees at this same path.",
        )
    try:
        quantization.block_scales(json.loads((folder / "config.json").read_text()), folder, field)
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidJob(f"{field}: the config of {model.path} cannot be read: {error}", FIX) from error
    set_noise(config, 0.0)
    vars(config).pop(quantization.KEY, None)
    return config


def policy(model: Model, config: Any, sharding: Sharding, *, dtype: torch.dtype) -> PreTrainedModel:
    """The language model with parameters of `dtype`, sharded and loaded. Raises InvalidJob."""

    def build() -> PreTrainedModel:
        return build_unfilled(loader_of(config), model, config, sharding, dtype=dtype)

    return shard_model(build, ModelFolder(loader_of(config), model, config, dtype, FIELD), sharding)


def build_unfilled(
    loader: Any, model: Model, config: Any, sharding: Sharding, *, dtype: torch.dtype, field: str = FIELD
) -> PreTrainedModel:
    """The model as transformers' `loader` builds it from `config`, without reading its parameters. Raises
    InvalidJob."""
    try:
        module: PreTrainedModel = loader.from_config(
            config,
            dtype=dtype,
            attn_implementation=sharding.attention,
            trust_remote_code=model.trust_remote_code,
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        how = named(sharding.attention)
        fix = "choose another architecture, or another trainer.backend_options.attention."
        raise InvalidJob(f"{field}: {model.path} cannot be built with {how} attention: {error}", fix) from error
    follow_folder(module, stored_shapes(Path(model.path)))
    module = with_tower(module, model, config) if sharding.with_tower else without_tower(module)
    check_computable(module, sharding.attention, model.path, field)
    recurrent.check_kernels(module, sharding.mesh.device_type, model.path, field)
    recurrent.install(module)
    return module


def shard_model(
    build: Callable[[], Module],
    folder: ModelFolder,
    sharding: Sharding,
    stored_part: str = "",
    fill_rest: Callable[[Module], None] = lambda _: None,
) -> Module:
    """The module that `build` makes, sharded over the ranks, with the tensors of `folder`.

    The folder stores the module, or its part of that name. `fill_rest` fills the other tensors, with this rank's part
    of each, and calls no collective. Raises InvalidJob on every rank if one cannot build the model or read the
    weights.
    """
    mesh = sharding.mesh
    with collectives.fail_together(), torch.device("meta"):
        module = build()
    stored: Any = module.get_submodule(stored_part)
    buffers = folder.buffers(stored)
    precision = MixedPrecisionPolicy(param_dtype=sharding.compute, reduce_dtype=torch.float32)
    # The layers of a tower get angles of positions in float32, and compute with them in float32.
    of_tower = {id(layer): replace(precision, cast_forward_inputs=False) for layer in tower_blocks(module)}
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if sharding.offload else OffloadPolicy()
    layers = decoder_layers(module)
    parts: list[nn.Module] = [*layers, module]
    for part in parts:
        own = of_tower.get(id(part), precision)
        shard = fully_shard(part, mesh=mesh, mp_policy=own, offload_policy=offload)
        # Sums, not means: a loss is divided by the whole batch's counts before it comes here. Gloo knows only sums.
        shard.set_gradient_divide_factor(1.0)
        shard.set_force_sum_reduction_for_comms(True)
    # Buckets of sequences and windows of images change in number from one micro-batch to the next: such a layer would
    # be compiled for each.
    apart = {id(part) for part in recurrent.layers(stored)} | of_tower.keys()
    compiled = [layer for layer in layers if not any(id(part) in apart for part in layer.modules())]
    for layer in compiled if sharding.compile else ():
        layer.forward = torch.compile(layer.forward, dynamic=True, options=_COMPILE_OPTIONS)  # inside FSDP's hooks
    module.to_empty(device="cpu" if sharding.offload else mesh.device_type)
    if isinstance(module, PreTrainedModel):
        module.tie_weights()
    folder.fill(stored, mesh, buffers)
    with collectives.fail_together():
        fill_rest(module)
    return module.train()


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The decoder layers: each is gathered and freed as a unit."""
    kinds = {kind for part in module.modules() for kind in getattr(part, "_no_split_modules", None) or ()}
    layers = [part for part in module.modules() if type(part).__name__ in kinds]
    if layers:
        return layers
    stacks = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return max((list(stack) for stack in stacks), key=len, default=[])

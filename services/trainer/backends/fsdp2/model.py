"""A Hugging Face model sharded over the ranks: built without memory, then filled from rank 0, which reads the
folder."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from millrace.data import quantization
from millrace.errors import InvalidJob
from millrace.spec.model import Model
from services.trainer.backends.fsdp2.computable import check_computable, named
from services.trainer.backends.fsdp2.sequence_parallel import SequenceGroup
from services.trainer.checkpoints.model_files import INDEX, SINGLE, ModelFiles
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
        _block_scales(folder, field)
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidJob(f"{field}: the config of {model.path} cannot be read: {error}", _FIX) from error
    for name in vars(config):
        if name.endswith(("dropout", "_pdrop", "layerdrop", "jitter_noise")) and isinstance(
            getattr(config, name), float
        ):
            setattr(config, name, 0.0)
    vars(config).pop(quantization.KEY, None)
    return config


_FIX = "give a model of an architecture that this release of transformers knows, or install a newer one."


def policy(model: Model, config: Any, sharding: Sharding, *, dtype: torch.dtype) -> PreTrainedModel:
    """The language model with parameters of `dtype`, sharded and loaded. Raises InvalidJob."""

    def build() -> PreTrainedModel:
        return build_unfilled(AutoModelForCausalLM, model, config, sharding, dtype=dtype)

    return shard_model(build, lambda _: read_whole(AutoModelForCausalLM, model, config, dtype=dtype), sharding)


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
    check_computable(module, sharding.attention, model.path, field)
    return module


def shard_model(build: Callable[[], Module], read: Callable[[Module], dict[str, Tensor]], sharding: Sharding) -> Module:
    """The module that `build` makes, sharded over the ranks and filled with the parameters and buffers that `read`
    returns for it on rank 0.

    Raises InvalidJob on every rank where one cannot build the model or rank 0 cannot read the weights.
    """
    source: dict[str, Tensor] = {}
    mesh = sharding.mesh
    with collectives.fail_together():
        with torch.device("meta"):
            module = build()
        if mesh.get_rank() == 0:
            source = read(module)
    precision = MixedPrecisionPolicy(param_dtype=sharding.compute, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if sharding.offload else OffloadPolicy()
    layers = decoder_layers(module)
    parts: list[nn.Module] = [*layers, module]
    for part in parts:
        shard = fully_shard(part, mesh=mesh, mp_policy=precision, offload_policy=offload)
        # Sums, not means: a loss is divided by the whole batch's counts before it comes here. Gloo knows only sums.
        shard.set_gradient_divide_factor(1.0)
        shard.set_force_sum_reduction_for_comms(True)
    for layer in layers if sharding.compile else ():
        layer.forward = torch.compile(layer.forward, dynamic=True, options=_COMPILE_OPTIONS)  # inside FSDP's hooks
    module.to_empty(device="cpu" if sharding.offload else mesh.device_type)
    if isinstance(module, PreTrainedModel):
        module.tie_weights()
    _fill(module, source, mesh)
    return module.train()


def read_whole(loader: Any, model: Model, config: Any, *, dtype: torch.dtype, field: str = FIELD) -> dict[str, Tensor]:
    """Parameters and buffers as transformers' `loader` reads them, in host memory: in the dtype of the folder, or,
    where its weights are quantized, in `dtype`. Raises InvalidJob."""
    transformers_logging.disable_progress_bar()
    read = _read_unquantized if _block_scales(Path(model.path), field) is None else _read_quantized
    try:
        loaded, report = read(loader, model, config, dtype)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise InvalidJob(f"{field}: {model.path} cannot be loaded: {error}", _FIX) from error
    if absent := sorted(report["missing_keys"]):
        what = f"{field}: {model.path} lacks {len(absent)} of the model's tensors, the first {absent[0]}."
        raise InvalidJob(what, "give a folder whose safetensors hold the whole model.")
    return {**dict(loaded.named_parameters()), **dict(loaded.named_buffers())}


def _block_scales(folder: Path, field: str) -> quantization.BlockScales | None:
    return quantization.block_scales(json.loads((folder / "config.json").read_text()), folder, field)


def _read_unquantized(loader: Any, model: Model, config: Any, dtype: torch.dtype) -> Any:
    if any((Path(model.path) / file).is_file() for file in (INDEX, SINGLE)):
        with ModelFiles(Path(model.path)) as files:
            files.check()
    return loader.from_pretrained(
        model.path,
        config=config,
        dtype="auto",
        trust_remote_code=model.trust_remote_code,
        output_loading_info=True,
    )


def _read_quantized(loader: Any, model: Model, config: Any, dtype: torch.dtype) -> Any:
    """Transformers gets the tensors of `ModelFiles` instead of the folder: on a GPU it would keep them quantized, and
    elsewhere it refuses blocks that do not divide a tensor."""
    config = copy.deepcopy(config)  # transformers writes the dtype into it
    with torch.device("meta"):
        kind = type(loader.from_config(config, trust_remote_code=model.trust_remote_code))
    with ModelFiles(Path(model.path)) as files:
        tensors = {name: files.tensor(name) for name in files}
        return kind.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True)


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The decoder layers: each is gathered and freed as a unit."""
    kinds = {kind for part in module.modules() for kind in getattr(part, "_no_split_modules", None) or ()}
    layers = [part for part in module.modules() if type(part).__name__ in kinds]
    if layers:
        return layers
    stacks = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return max((list(stack) for stack in stacks), key=len, default=[])


@torch.no_grad()
def _fill(module: nn.Module, source: dict[str, Tensor], mesh: DeviceMesh) -> None:
    """Copies rank 0's tensors into the shards and buffers of every rank, one tensor at a time."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=mesh.device_type)
        if mesh.get_rank() == 0:
            whole.copy_(source[name])
        if isinstance(tensor, DTensor):
            tensor.copy_(distribute_tensor(whole, tensor.device_mesh, tensor.placements))
            continue
        if mesh.size() > 1:
            dist.broadcast(whole, 0)
        tensor.copy_(whole)

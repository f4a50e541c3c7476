"""Access to the float32 weights (master weights) and moments of Megatron's optimizers.

An optimizer keeps them next to the parameters, in shares of the distributed optimizer, in Transformer Engine's Adam, or
in host memory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from torch import Tensor, nn


@dataclass(frozen=True)
class OwnedRange:
    """A range of a flattened parameter whose optimizer state this rank keeps: all of it, or a share of it."""

    parameter: nn.Parameter
    master: Tensor
    """The weights that are updated, float32, flat. They are the parameter's memory if that is float32."""
    first: int
    """Index in the flattened parameter at which the range begins."""
    inner: torch.optim.Optimizer
    """The optimizer that updates the range."""
    key: Tensor
    """The tensor under which that optimizer keeps the state."""

    def moment(self, name: str) -> Tensor | None:
        """A moment, flat; None before the first update."""
        state = self.inner.state.get(self.key, {})
        return state[name].view(-1) if name in state and _updated(self.inner, state) else None


def owned_ranges(part: MegatronOptimizer) -> Iterator[OwnedRange]:
    """The ranges of all parameters of an optimizer whose state this rank keeps."""
    inner: Any = part.optimizer
    if isinstance(inner, HybridDeviceOptimizer):
        yield from _hybrid_ranges(part)
    elif _has_masters(inner):
        for parameter, shard, first in _shards(part):
            yield OwnedRange(parameter, _master(inner, shard), first, inner, shard)
    elif isinstance(part, DistributedOptimizer):
        pairs = [
            *zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True),
            *zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True),
        ]
        for parameters, masters in pairs:
            for parameter, master in zip(parameters, masters, strict=True):
                first = part._get_model_param_range_map(parameter)["param"].start
                yield OwnedRange(parameter, master.detach(), first, inner, master)
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        for parameters, masters in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            for parameter, master in zip(parameters, masters, strict=True):
                yield OwnedRange(parameter, master.detach().view(-1), 0, inner, master)
        for parameters in part.fp32_from_fp32_groups:
            yield from (OwnedRange(p, p.detach().view(-1), 0, inner, p) for p in parameters)
    else:
        yield from (OwnedRange(p, p.detach().view(-1), 0, inner, p) for p in part.get_parameters())


def copy_to_parameters(part: MegatronOptimizer) -> None:
    """Copies the master weights to the parameters, or to this rank's share of them."""
    inner: Any = part.optimizer
    if isinstance(inner, HybridDeviceOptimizer):
        for parameter, master in inner.param_to_inner_param.items():
            parameter.data.copy_(master.data)
    elif _has_masters(inner):
        for parameter in part.get_parameters():
            parameter.data.copy_(_master(inner, parameter))
    elif isinstance(part, DistributedOptimizer | Float16OptimizerWithFloat16Params):
        part._copy_main_params_to_model_params()


def to_host(part: MegatronOptimizer) -> list[Tensor]:
    """Moves the separate master weights and moments that are on the device to pinned host memory, and returns them. The
    tensor objects stay the same. What an optimizer always keeps in host memory stays as it is."""
    moved = [tensor for tensor in _separate_tensors(part) if tensor.is_cuda]
    for tensor in moved:
        if tensor.is_cuda:  # a master weight may be listed twice
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            tensor.data = host
    torch.cuda.synchronize()
    return moved


def to_device(moved: list[Tensor]) -> None:
    """Moves back what `to_host` has moved."""
    for tensor in moved:
        tensor.data = tensor.data.to(torch.cuda.current_device(), non_blocking=True)


def _separate_tensors(part: MegatronOptimizer) -> Iterator[Tensor]:
    """Master weights and moments that are not the memory of a parameter."""
    for owned in owned_ranges(part):
        if owned.parameter.dtype is not torch.float32 and not _has_masters(owned.inner):
            yield owned.key
        yield from (value for value in owned.inner.state.get(owned.key, {}).values() if torch.is_tensor(value))


def create_master_weights(part: MegatronOptimizer) -> None:
    """Creates the master weights that Transformer Engine's Adam would create in its first update. To be called before
    master weights are written."""
    if _has_masters(part.optimizer):
        _create_masters(part.optimizer)


def make_moments(part: MegatronOptimizer) -> None:
    """Creates the moments, 0, that the first update would create: all of them, or none if memory runs out."""
    made: list[tuple[torch.optim.Optimizer, Tensor]] = []
    try:
        for inner in _inner(part.optimizer):
            for parameter in [each for each in _parameters(inner) if not inner.state.get(each)]:
                made.append((inner, parameter))
                _zero_moments(inner, parameter, 0)
    except torch.OutOfMemoryError:
        for inner, parameter in made:
            inner.state.pop(parameter, None)
        raise


def make_room(part: MegatronOptimizer, updates: int) -> None:
    """Sets the moments to 0 and the number of updates to `updates`, for a checkpoint to be read into."""
    for inner in _inner(part.optimizer):
        inner.state.clear()
        for group in inner.param_groups:
            group.pop("step", None)
        if _has_masters(inner):
            _create_masters(inner)
            _count_steps(inner, updates)
        elif updates:
            if not isinstance(inner, torch.optim.AdamW):
                _count_steps(inner, updates)
            for parameter in _parameters(inner):
                _zero_moments(inner, parameter, updates)


def _inner(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The torch optimizers of an optimizer: several if a part of it runs on the host."""
    return optimizer.sub_optimizers if isinstance(optimizer, HybridDeviceOptimizer) else [optimizer]


def _has_masters(inner: torch.optim.Optimizer) -> bool:
    """Whether this is Transformer Engine's Adam, with the master weights in its state."""
    return getattr(inner, "master_weights", None) is True


def _create_masters(inner: Any) -> None:
    """Creates master weights, and moments of 0 in their dtype, which the first update would create otherwise."""
    for parameter in _parameters(inner):
        inner.initialize_state(parameter, False)


def _parameters(inner: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in inner.param_groups:
        yield from group["params"]


def _master(inner: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    found: Tensor = parameter if parameter.dtype is torch.float32 else inner.state[parameter]["master_param"]
    return found.detach()


def _updated(inner: torch.optim.Optimizer, state: Mapping[str, Any]) -> bool:
    """Whether there has been an update of a parameter with this state. Transformer Engine's Adam counts its steps in
    the group, torch's in the state of each parameter."""
    if isinstance(inner, torch.optim.AdamW):
        return bool(state["step"] > 0)
    return any("step" in group for group in inner.param_groups)


def _hybrid_ranges(part: DistributedOptimizer) -> Iterator[OwnedRange]:
    """The ranges of an optimizer that runs partly on the host, which has its own master weights."""
    hybrid = part.optimizer
    optimizer_of = {
        id(master): inner for inner in _inner(hybrid) for group in inner.param_groups for master in group["params"]
    }
    for parameter, shard, first in _shards(part):
        master = hybrid.param_to_inner_param[shard]
        yield OwnedRange(parameter, master.detach(), first, optimizer_of[id(master)], master)


def _shards(part: DistributedOptimizer) -> Iterator[tuple[nn.Parameter, Tensor, int]]:
    """Each parameter, this rank's share of it in the parameter's dtype, and where the share begins."""
    pairs = [
        *zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True),
        *zip(part.model_float16_groups, part.shard_float16_groups, strict=True),
    ]
    for parameters, shards in pairs:
        for parameter, shard in zip(parameters, shards, strict=True):
            yield parameter, shard, part._get_model_param_range_map(parameter)["param"].start


def _count_steps(inner: torch.optim.Optimizer, updates: int) -> None:
    for group in inner.param_groups if updates else ():
        group["step"] = updates


def _zero_moments(inner: torch.optim.Optimizer, parameter: Tensor, updates: int) -> None:
    """Creates a parameter's moments, 0; with torch's Adam as after this number of updates."""
    state = inner.state[parameter]
    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    if isinstance(inner, torch.optim.AdamW):
        state["step"] = torch.tensor(float(updates))

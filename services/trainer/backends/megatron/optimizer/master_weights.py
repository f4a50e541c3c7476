"""Where Megatron's optimizers keep the float32 weights and the moments: beside the parameters, in shares of the
distributed optimizer, in Transformer Engine's Adam, or in host memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from torch import Tensor, nn


@dataclass(frozen=True)
class OwnedRange:
    """A run of a parameter whose optimizer state this rank keeps: all of it, or its share of the distributed one."""

    parameter: nn.Parameter
    master: Tensor
    """float32, flat: the weights that are updated; the parameter's own memory where that is float32."""
    first: int
    """Where it begins in the flattened parameter."""
    inner: torch.optim.Optimizer
    key: Tensor
    """What the inner optimizer calls it."""

    def moment(self, name: str) -> Tensor | None:
        """None before the first update."""
        state = self.inner.state.get(self.key, {})
        return state[name].view(-1) if name in state and not _untouched(self.inner) else None


def owned(part: MegatronOptimizer) -> Iterator[OwnedRange]:
    inner: Any = part.optimizer
    if isinstance(inner, HybridDeviceOptimizer):
        yield from _owned_by_several(part)
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
    """The float32 weights to the parameters, or to this rank's share of them."""
    inner: Any = part.optimizer
    if isinstance(inner, HybridDeviceOptimizer):
        for parameter, master in inner.param_to_inner_param.items():
            parameter.data.copy_(master.data)
    elif _has_masters(inner):
        for parameter in part.get_parameters():
            parameter.data.copy_(_master(inner, parameter))
    elif isinstance(part, DistributedOptimizer | Float16OptimizerWithFloat16Params):
        part._copy_main_params_to_model_params()


def to_host(part: MegatronOptimizer) -> None:
    """Weights that are the optimizer's alone, and moments, to pinned host memory: the same tensors, elsewhere."""
    for tensor in _apart(part):
        if tensor.is_cuda:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            tensor.data = host
    torch.cuda.synchronize()


def to_device(part: MegatronOptimizer) -> None:
    for tensor in _apart(part):
        tensor.data = tensor.data.to(torch.cuda.current_device(), non_blocking=True)


def _apart(part: MegatronOptimizer) -> Iterator[Tensor]:
    """What no parameter lies in."""
    for run in owned(part):
        if run.parameter.dtype is not torch.float32 and not _has_masters(run.inner):
            yield run.key
        yield from (value for value in run.inner.state.get(run.key, {}).values() if torch.is_tensor(value))


def prepare(part: MegatronOptimizer) -> None:
    """Before the weights are first written: those that Transformer Engine's Adam would create in its first update."""
    if _has_masters(part.optimizer):
        _create_masters(part.optimizer)


def make_room(part: MegatronOptimizer, updates: int) -> None:
    """Moments of zero, as after `updates` updates; weights that are to be written."""
    for inner in _inner(part.optimizer):
        inner.state.clear()
        for group in inner.param_groups:
            group.pop("step", None)
        if _has_masters(inner):
            _create_masters(inner)
            _count_steps(inner, updates)
        elif updates:
            _zero_moments(inner, updates)


def _inner(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that compute: several where some are on the host."""
    return optimizer.sub_optimizers if isinstance(optimizer, HybridDeviceOptimizer) else [optimizer]


def _has_masters(inner: torch.optim.Optimizer) -> bool:
    """Whether it is Transformer Engine's Adam with the float32 weights among its state."""
    return getattr(inner, "master_weights", None) is True


def _create_masters(inner: Any) -> None:
    """And moments of zero, in their dtype, which else the first update would."""
    for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
        inner.initialize_state(parameter, False)


def _master(inner: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    found: Tensor = parameter if parameter.dtype is torch.float32 else inner.state[parameter]["master_param"]
    return found.detach()


def _untouched(inner: torch.optim.Optimizer) -> bool:
    """Whether there has been no update, where that shows in nothing else."""
    return _has_masters(inner) and not any("step" in group for group in inner.param_groups)


def _owned_by_several(part: DistributedOptimizer) -> Iterator[OwnedRange]:
    """Of an optimizer that is partly on the host: the master weights are its own."""
    hybrid = part.optimizer
    homes = {
        id(master): inner for inner in _inner(hybrid) for group in inner.param_groups for master in group["params"]
    }
    for parameter, shard, first in _shards(part):
        master = hybrid.param_to_inner_param[shard]
        yield OwnedRange(parameter, master.detach(), first, homes[id(master)], master)


def _shards(part: DistributedOptimizer) -> Iterator[tuple[nn.Parameter, Tensor, int]]:
    """Each parameter, this rank's share of it in its own dtype, and where that begins."""
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


def _zero_moments(inner: torch.optim.Optimizer, updates: int) -> None:
    """Transformer Engine's Adam counts its steps in the group, torch's in each parameter's state."""
    counts_in_groups = not isinstance(inner, torch.optim.AdamW)
    for group in inner.param_groups:
        if counts_in_groups:
            group["step"] = updates
        for parameter in group["params"]:
            state = inner.state[parameter]
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            if not counts_in_groups:
                state["step"] = torch.tensor(float(updates))

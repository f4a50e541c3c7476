"""A sharded module with its AdamW: the common part of policy and critic."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from millrace.memory.ledger import Part
from millrace.spec.trainer import Optimizer
from services.trainer.backends.fsdp2.activation_offload import ActivationOffload
from services.trainer.backends.fsdp2.host_adamw import HostAdamW
from services.trainer.protocol.local_tensors import NamedTensors
from services.trainer.protocol.microbatch import MicroBatch

MOMENTS = ("exp_avg", "exp_avg_sq")


class Sums(Enum):
    """How gradients are added up over the micro-batches of an update."""

    REDUCED = auto()
    """After each micro-batch over all ranks; a rank keeps its shard of the sum."""
    OWN_SHARD = auto()
    """After each micro-batch over the ranks that share a copy of the model; over the copies after the last one."""
    WHOLE = auto()
    """One rank has the whole module, and gradients are added up where the backward pass leaves them. FSDP would copy
    those of each micro-batch to float32, divide them by 1, copy and add them."""


class DeviceAdamW:
    """torch's AdamW, whose moments are where the weights are. Has the methods of `HostAdamW`."""

    def __init__(self, parameters: Mapping[str, Tensor], chosen: Optimizer) -> None:
        self._parameters = parameters
        self._optimizer = torch.optim.AdamW(
            parameters.values(),
            lr=chosen.lr,
            betas=chosen.betas,
            eps=chosen.eps,
            weight_decay=chosen.weight_decay,
            fused=True,
        )

    def make_moments(self) -> None:
        """Allocates the moments of weights that have a gradient for the first time: of all of them, or of none."""
        state = self._optimizer.state
        trained = [each for each in self._parameters.values() if each.grad is not None and each not in state]
        state.update({parameter: _no_moments(parameter, 0) for parameter in trained})

    def step(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def moments(self) -> NamedTensors:
        state = self._optimizer.state
        return {
            f"{kind}.{name}": state[parameter][kind]
            for name, parameter in self._parameters.items()
            for kind in MOMENTS
            if parameter in state
        }

    def tensors(self) -> list[Tensor]:
        states = [value for state in self._optimizer.state.values() for value in state.values()]
        return [value for value in states if isinstance(value, Tensor)]

    def reset_moments(self, updates: int) -> None:
        self._optimizer.state.clear()
        for parameter in self._parameters.values() if updates else ():
            self._optimizer.state[parameter] = _no_moments(parameter, updates)


def _no_moments(parameter: Tensor, updates: int) -> dict[str, Tensor]:
    """The state that AdamW keeps for a parameter after this number of updates, with moments of 0."""
    step = torch.tensor(float(updates), dtype=torch.float32, device=parameter.device)
    return {"step": step, **{kind: torch.zeros_like(parameter.detach()) for kind in MOMENTS}}


class ShardedModel:
    """Implements `services.trainer.protocol.backend.TrainableModel`."""

    def __init__(
        self,
        module: nn.Module,
        chosen: Optimizer,
        device: torch.device,
        *,
        offload_optimizer: bool = False,
        sums: Sums = Sums.REDUCED,
    ) -> None:
        self._model: Any = module
        self._trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
        self._frozen: list[Tensor] = [parameter for parameter in module.parameters() if not parameter.requires_grad]
        self._device = device
        self._sums = sums
        self._sums_stream: torch.cuda.Stream | None = None
        if sums is Sums.WHOLE:
            cast(FSDPModule, module).set_requires_gradient_sync(False)
            self._sums_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._activations: ActivationOffload | None = None
        kind = HostAdamW if offload_optimizer else DeviceAdamW
        self._optimizer: HostAdamW | DeviceAdamW = kind(self._trained, chosen)
        self.updates = 0

    def with_gradients_added_up(self, microbatches: Sequence[MicroBatch], *, more: bool) -> Iterator[MicroBatch]:
        """The micro-batches, for a forward and a backward pass each. After the last one parameters have their
        gradients, unless `more` follow: see `Sums`."""
        if self._sums is Sums.WHOLE:
            begin_own_sums(self._model, self._sums_stream)
        for number, batch in enumerate(microbatches, 1):
            if self._sums is Sums.OWN_SHARD:
                self._model.set_requires_all_reduce(number == len(microbatches) and not more)
            yield batch
        if self._sums is Sums.WHOLE and not more:
            take_own_sums(self._model)

    def offload_activations(self, layers: Iterable[nn.Module]) -> None:
        """Later passes keep in host memory what the module saves; `layers` as in `ActivationOffload.install`."""
        self._activations = ActivationOffload(self._device)
        self._activations.install(self._model, layers)

    def gradient_norm(self) -> float:
        gradients = [parameter.grad for parameter in self._trained.values() if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def prepare_update(self) -> None:
        self._optimizer.make_moments()

    def optimizer_step(self, *, lr: float, gradient_scale: float) -> None:
        for parameter in self._trained.values():
            if parameter.grad is not None:
                parameter.grad.mul_(gradient_scale)
        self._optimizer.step(lr)
        self.updates += 1
        self.zero_gradients()

    def zero_gradients(self) -> None:
        self._optimizer.zero_grad()
        if self._sums is not Sums.REDUCED:
            forget_own_sums(self._model)

    def abandon_pass(self) -> None:
        reset_sharding(self._model)
        if self._activations is not None:
            self._activations.forget()
        self.zero_gradients()
        if not self.updates:
            self._optimizer.reset_moments(0)  # as checkpoints have it: no moments before the first update

    def held(self) -> dict[Part, list[Tensor]]:
        trained: list[Tensor] = list(self._trained.values())
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None] + own_sums(self._model)
        moments = self._optimizer.tensors()
        if self._frozen:
            return {Part.WEIGHTS: self._frozen, Part.ADAPTER: [*trained, *gradients, *moments]}
        return {Part.WEIGHTS: trained, Part.GRADIENTS: gradients, Part.OPTIMIZER: moments}

    def state(self) -> NamedTensors:
        weights = {f"model.{name}": tensor.detach() for name, tensor in self._trained.items()}
        return {**weights, **self._optimizer.moments()}

    def prepare_state(self, updates: int) -> NamedTensors:
        self.updates = updates
        self._optimizer.reset_moments(updates)
        return self.state()


def reset_sharding(module: Any) -> None:
    """Frees the whole weights that an interrupted pass gathered, with their gradients, and ends that pass for FSDP."""
    module.zero_grad()  # of what is whole now: FSDP would add these gradients to those of the next pass
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()
    else:  # torch before 2.13
        module._get_fsdp_state()._root_post_backward_final_callback()
        module.reshard()


def begin_own_sums(module: nn.Module, stream: torch.cuda.Stream | None) -> None:
    """Gives FSDP zeros to add the gradients of a module to that one rank has whole, unless it has them. `stream` only
    allocates: among activations, whose sizes change, this memory would leave gaps that are of no use."""
    for group in _groups(module):
        for parameter in group.fsdp_params:
            sharded = parameter.sharded_param
            if sharded.requires_grad and sharded.grad is None and parameter.unsharded_accumulated_grad is None:
                with torch.no_grad(), torch.cuda.stream(stream):
                    zeros = torch.empty(sharded.shape, dtype=torch.float32, device=sharded.device)
                parameter.unsharded_accumulated_grad = zeros.zero_()


def take_own_sums(module: nn.Module) -> None:
    """Gives the parameters their sums as gradients. A parameter that no pass used gets none."""
    for group in _groups(module):
        for parameter in group.fsdp_params:
            total, sharded = parameter.unsharded_accumulated_grad, parameter.sharded_param
            if total is not None and total._version > 1:  # changed since it was set to 0
                sharded.grad = parameter.to_sharded_dtensor(total.to(sharded.dtype))
    forget_own_sums(module)


def own_sums(module: nn.Module) -> list[Tensor]:
    """The sums of gradients that FSDP has not reduced."""
    kept = [parameter.unsharded_accumulated_grad for group in _groups(module) for parameter in group.fsdp_params]
    return [total for total in kept if total is not None]


def forget_own_sums(module: nn.Module) -> None:
    """Forgets what a rank has added up of its own micro-batches, if a pass ended before the last of them: FSDP would
    add it to the next pass."""
    for group in _groups(module):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):  # from the first pass on
                parameter._unsharded_param.grad = None


def _groups(module: nn.Module) -> Iterator[Any]:
    """FSDP's group of parameters of each part that is gathered as a unit."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state: Any = part._get_fsdp_state()
            if (group := state._fsdp_param_group) is not None:
                yield group

"""AdamW whose moments are in host memory between updates; weights and gradients stay where they are."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from millrace.spec.trainer import Optimizer
from services.trainer.backends.fsdp2.loading import LocalPart
from services.trainer.protocol.local_tensors import LocalBoxes, NamedTensors

PART_BYTES = 512 << 20
"""Bytes of the weights that are updated at a time: twice as many of moments are on the device."""


@dataclass
class _Weight:
    """This rank's part of one weight, and its moments in host memory."""

    name: str
    parameter: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class HostAdamW:
    """Updates as `torch.optim.AdamW` does: its function, on a few weights at a time, which get their moments from host
    memory and give them back."""

    def __init__(self, parameters: Mapping[str, Tensor], chosen: Optimizer) -> None:
        self._parameters = parameters
        self._chosen = chosen
        self._weights: list[_Weight] = []
        self._steps = 0

    def make_moments(self) -> None:
        """Allocates the moments of all weights, if there are none yet: all of them, or none."""
        self._weights = self._weights or [self._without_moments(*each) for each in self._parameters.items()]

    def step(self, lr: float) -> None:
        """One update of every weight that has a gradient."""
        self.make_moments()
        for part in self._parts():
            self._update(part, lr)
        self._steps += 1
        if any(weight.exp_avg.is_pinned() for weight in self._weights):
            torch.cuda.synchronize()  # a checkpoint that reads the moments now reads those of this update

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def moments(self) -> NamedTensors:
        """This rank's part of every moment, by kind and weight."""
        found: dict[str, LocalBoxes] = {}
        for weight in self._weights:
            offset = LocalPart.of(weight.parameter).offset
            for kind, values in (("exp_avg", weight.exp_avg), ("exp_avg_sq", weight.exp_avg_sq)):
                boxes = LocalBoxes(tuple(weight.parameter.shape), values.dtype, parts={offset: values})
                found[f"{kind}.{weight.name}"] = boxes
        return found

    def tensors(self) -> list[Tensor]:
        """Every tensor of the optimizer's state on this rank."""
        return [moment for weight in self._weights for moment in (weight.exp_avg, weight.exp_avg_sq)]

    def reset_moments(self, updates: int) -> None:
        """Sets the state as it is after `updates` updates; the moments are 0."""
        self._weights, self._steps = [], updates
        if updates:
            self.make_moments()

    def _without_moments(self, name: str, parameter: Tensor) -> _Weight:
        local = LocalPart.of(parameter).values
        pinned = local.device.type == "cuda"
        moments = (torch.zeros(local.shape, dtype=local.dtype, pin_memory=pinned) for _ in range(2))
        return _Weight(name, parameter, *moments)

    def _parts(self) -> Iterator[list[_Weight]]:
        part: list[_Weight] = []
        held = 0
        for weight in self._weights:
            if part and held + weight.exp_avg.nbytes > PART_BYTES:
                yield part
                part, held = [], 0
            part.append(weight)
            held += weight.exp_avg.nbytes
        if part:
            yield part

    @torch.no_grad()
    def _update(self, part: Sequence[_Weight], lr: float) -> None:
        part = [weight for weight in part if weight.parameter.grad is not None]
        values = [LocalPart.of(weight.parameter).values for weight in part]
        gradients = [LocalPart.of(weight.parameter.grad).values for weight in part if weight.parameter.grad is not None]
        host = [(weight.exp_avg, weight.exp_avg_sq) for weight in part]
        on_device = [
            tuple(torch.empty_like(value).copy_(moment, non_blocking=True) for moment in moments)
            for value, moments in zip(values, host, strict=True)
        ]
        adamw(
            values,
            gradients,
            [moments[0] for moments in on_device],
            [moments[1] for moments in on_device],
            [],
            [torch.tensor(float(self._steps), device=value.device) for value in values],
            fused=True,
            amsgrad=False,
            beta1=self._chosen.betas[0],
            beta2=self._chosen.betas[1],
            lr=lr,
            weight_decay=self._chosen.weight_decay,
            eps=self._chosen.eps,
            maximize=False,
        )
        for moments, computed in zip(host, on_device, strict=True):
            for moment, value in zip(moments, computed, strict=True):
                moment.copy_(value, non_blocking=True)

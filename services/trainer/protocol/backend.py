"""The protocol of a training backend, which holds the model and computes.

A backend spans all ranks. Every method is called on every rank in the same order, from the main thread.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from millrace.errors import InvalidState
from millrace.memory.ledger import Part
from millrace.sequence_cost import SequenceCost
from millrace.weights.plans.manifest import Content, TensorInfo
from services.trainer.protocol.adapter import Adapter, Published
from services.trainer.protocol.local_tensors import NamedTensors
from services.trainer.protocol.microbatch import MicroBatch


@dataclass(frozen=True)
class TokenScores:
    """What the model computes for the sampled tokens of a micro-batch, in their order."""

    logprobs_r: Tensor
    """Log-probabilities at the job's temperature, float32 [R], nats."""
    entropy_r: Tensor | None
    """Entropies of the same distributions, float32 [R], nats; None if they were not asked for."""
    others_rk: Tensor | None = None
    """Log-probabilities of `MicroBatch.others_rk` in the same distributions, float32 [R, K], nats; None if there are
    none."""

    @classmethod
    def of(cls, scores_kr: Tensor) -> Self:
        """The scores from a head's rows: log-probabilities, entropies, and a row for each further token."""
        return cls(scores_kr[0], scores_kr[1], scores_kr[2:].t() if len(scores_kr) > 2 else None)


Output = TypeVar("Output")

LossFn = Callable[[MicroBatch, TokenScores], tuple[Tensor, Output]]
"""Computes a micro-batch's share of the batch's loss, a scalar, and an output that the backend returns."""

ValueLossFn = Callable[[MicroBatch, Tensor], tuple[Tensor, Output]]
"""The same from the critic's values, float32 [R]: for each sampled token the reward that is still to come."""


@dataclass(frozen=True)
class DataParallel:
    """Which share of a batch this rank computes. Tensor and pipeline parallel ranks of one share have equal values."""

    rank: int
    size: int
    group: ProcessGroup | None
    """The ranks over which a batch is summed; None if one rank computes all of it."""
    stages: int = 1
    """Pipeline stages, each of which computes another micro-batch of the share at the same time."""

    @property
    def microbatches_at_once(self) -> int:
        """Micro-batches that keep all ranks busy."""
        return self.size * self.stages


class TrainableModel(Protocol):
    """A model and its optimizer."""

    cost: SequenceCost
    """FLOPs of training on a sequence by its length: for balancing, and for the utilisation of the devices."""

    def gradient_norm(self) -> float:
        """Norm of the gradients added so far, the same on every rank; infinite or NaN if a gradient is."""

    def prepare_update(self) -> None:
        """Allocates what the optimizer keeps from the model's first update on: all of it, or none if there is no
        memory for it. Called when the gradients are there, before any weight of the step's update is written."""

    def optimizer_step(self, *, lr: float, gradient_scale: float) -> None:
        """Multiplies the gradients by the scale, updates the weights and clears the gradients."""

    def zero_gradients(self) -> None:
        """Clears the gradients added so far."""

    def abandon_pass(self) -> None:
        """Frees what a pass that an exception interrupted left: gradients and gathered weights. Not a collective."""

    def held(self) -> Mapping[Part, Sequence[Tensor]]:
        """The tensors that this rank keeps, by part: weights, gradients, optimizer, adapter, and of a policy its
        reference."""

    def state(self) -> NamedTensors:
        """The tensors of model and optimizer that this rank holds, to be saved."""

    def prepare_state(self, updates: int) -> NamedTensors:
        """The same tensors with the optimizer as after `updates` updates: memory to read a checkpoint into."""

    @property
    def updates(self) -> int:
        """Number of optimizer updates so far."""


class Critic(TrainableModel, Protocol):
    """The value model: the policy's architecture with one number per token."""

    folder: Path
    """The model folder that it was loaded from."""
    config: Mapping[str, object]
    """The entries in which its config.json differs from that of the folder."""

    def values(self, microbatches: Sequence[MicroBatch]) -> list[Tensor]:
        """The value before each sampled token: float32 [R] for each micro-batch, without gradient."""

    def forward_backward(
        self, microbatches: Sequence[MicroBatch], loss_fn: ValueLossFn[Output], *, more: bool = False
    ) -> list[Output]:
        """The same as `Backend.forward_backward`, for the critic's gradient."""

    def export(self, dtype: str) -> Iterator[tuple[TensorInfo, Tensor | None]]:
        """The same as `Backend.export`: the decoder and its head, `score`."""


class Backend(TrainableModel, Published, Protocol):
    """The policy, with the reference and the critic that the job's algorithm needs. What it publishes itself is the
    tensors of the model folder (`Content.MODEL`), with the adapter merged into them."""

    device: torch.device
    data_parallel: DataParallel
    parameters: int
    """Number of trainable parameters of the whole policy."""
    critic: Critic | None
    """The critic; None for a job without one."""
    adapter: Adapter | None
    """What is trained of the policy in place of its weights; None if all weights are trained."""

    def rest(self) -> None:
        """Neither a pass nor a publication needs the weights until the next call: a job may have them in host memory
        until then."""

    def logprobs(
        self, microbatches: Sequence[MicroBatch], *, temperature: float, reference: bool = False
    ) -> list[Tensor]:
        """Log-probabilities of policy or reference: float32 [R] for each micro-batch, without gradient."""

    def scores(self, microbatches: Sequence[MicroBatch], *, temperature: float) -> list[TokenScores]:
        """Log-probabilities and entropies of the policy for each micro-batch, without gradient."""

    def forward_backward(
        self, microbatches: Sequence[MicroBatch], loss_fn: LossFn[Output], *, temperature: float, more: bool = False
    ) -> list[Output]:
        """Adds the gradient of the sum of the losses of all micro-batches on all ranks, and returns the output of
        `loss_fn` for each micro-batch. The backend decides the order of the micro-batches (pipeline stages) and scales
        the losses as its schedule needs.

        `more`: further calls add to the same gradient before it is read or cleared. Ranks may sum theirs in the last of
        these calls, which has `more` false."""

    @property
    def tower_flops(self) -> float:
        """FLOPs that a tower for images computed on this rank since the backend was built. None of them is in
        `cost`."""

    def metrics(self) -> dict[str, float]:
        """Metrics of this rank's last update that only this backend has, with the same names on every rank."""


def models(backend: Backend) -> dict[str, TrainableModel]:
    """The models that a step trains, by the prefix of their tensors in a checkpoint."""
    critic = {} if backend.critic is None else {"critic.": backend.critic}
    return {"": backend, **critic}


def published(backend: Backend, content: Content) -> Published:
    """The tensors of `content`. Raises InvalidState if the job has no adapter that can be published alone."""
    if content is Content.MODEL:
        return backend
    parts = backend.adapter.parts if backend.adapter is not None else {}
    if content not in parts:
        what = f"this trainer has no {content.name.lower()} to publish apart from the model."
        raise InvalidState(what, "set model.lora.merge to true.")
    return parts[content]

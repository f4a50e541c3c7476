"""The protocol of a training backend, which holds the model and computes.

A backend spans all ranks. Every method is called on every rank in the same order, from the main thread.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from millrace.batching.cost import SequenceCost
from millrace.weights.plans.manifest import Manifest, TensorInfo
from millrace.weights.plans.memory import Memory
from services.trainer.protocol.local_tensors import NamedTensors
from services.trainer.protocol.microbatch import MicroBatch


@dataclass(frozen=True)
class TokenScores:
    """What the model says of the response tokens of a micro-batch, in their order."""

    logprobs_r: Tensor
    """float32 [R], nats, of the distribution at the job's temperature."""
    entropy_r: Tensor | None
    """float32 [R], nats, of the same distribution; none where it was not asked for."""


LossFn = Callable[[MicroBatch, TokenScores], tuple[Tensor, Any]]
"""This micro-batch's share of the batch's loss, a scalar, and whatever the caller wants back."""


ValueLossFn = Callable[[MicroBatch, Tensor], tuple[Tensor, Any]]
"""As `LossFn`, of the critic's values: float32 [R], at each response token what the policy is still to be rewarded."""


@dataclass(frozen=True)
class DataParallel:
    """Which share of a batch this rank computes. Ranks of one share (tensor or pipeline parallel) have equal ones."""

    rank: int
    size: int
    group: ProcessGroup | None
    """The ranks among which sums over the batch run; none where there is only one."""


class TrainableModel(Protocol):
    """A model and its optimizer."""

    def gradient_norm(self) -> float:
        """Of the gradients added so far, the same on every rank; infinite or NaN where one of them is."""

    def optimizer_step(self, *, lr: float, gradient_scale: float) -> None:
        """Multiplies the gradients, updates the weights by them and clears them."""

    def zero_gradients(self) -> None: ...

    def state(self) -> NamedTensors:
        """Model and optimizer as named tensors, sharded as they lie: to save."""

    def prepare_state(self, updates: int) -> NamedTensors:
        """As `state`, with the optimizer as it is after `updates` updates: room for a checkpoint to be read into."""

    @property
    def updates(self) -> int:
        """Optimizer updates so far."""


class Critic(TrainableModel, Protocol):
    """The value model: the policy's architecture with one number a token."""

    folder: Path
    """That it was loaded from."""
    config: Mapping[str, Any]
    """What its config.json says otherwise than that folder's."""

    def values(self, microbatches: Sequence[MicroBatch]) -> list[Tensor]:
        """[R] of each micro-batch, float32, without gradient: of the state in which each response token was chosen."""

    def forward_backward(self, microbatches: Sequence[MicroBatch], loss_fn: ValueLossFn) -> list[Any]:
        """As the policy's."""

    def export(self, dtype: str) -> Iterator[tuple[TensorInfo, Tensor | None]]:
        """As the policy's: the decoder and its head, `score`."""


class Backend(TrainableModel, Protocol):
    """The policy, and beside it what the job's algorithm needs: a reference, a critic."""

    device: torch.device
    data_parallel: DataParallel
    parameters: int
    """Trainable numbers in the whole policy."""
    cost: SequenceCost
    """What a sequence costs, for balancing."""
    critic: Critic | None
    """None where the job has none."""

    def logprobs(
        self, microbatches: Sequence[MicroBatch], *, temperature: float, reference: bool = False
    ) -> list[Tensor]:
        """[R] of each micro-batch, float32, without gradient; of the reference policy if asked."""

    def forward_backward(self, microbatches: Sequence[MicroBatch], loss_fn: LossFn, *, temperature: float) -> list[Any]:
        """Adds the gradient of the sum of all micro-batches' losses on all ranks; returns what `loss_fn` gave beside
        each loss. The backend schedules the micro-batches as it likes (pipeline stages) and owns the scaling."""

    def manifest(self, dtype: str) -> Manifest:
        """What `export` gives, in its order."""

    def export(self, dtype: str) -> Iterator[tuple[TensorInfo, Tensor | None]]:
        """The model tensor by tensor in Hugging Face terms: whole on rank 0, on `device`; None on the others."""

    def shards(self, dtype: str) -> Memory | None:
        """What this rank holds of the manifest's tensors, as views of the memory that trains. None where some tensor
        has no boxes here to be told by. No collective."""

    def memory(self) -> dict[str, float]:
        """Metrics of this rank's memory, in verl's names."""


def models(backend: Backend) -> dict[str, TrainableModel]:
    """Everything that a step trains, by the prefix of its tensors in a checkpoint."""
    critic = {} if backend.critic is None else {"critic.": backend.critic}
    return {"": backend, **critic}

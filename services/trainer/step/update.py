"""One update of the policy, and of the critic where there is one, on their share of the batch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from millrace.errors import InvalidJob, NonFinite
from millrace.rl.aggregation import BatchTotals
from millrace.rl.checks import check_finite
from millrace.rl.metrics.loss_metrics import summarised
from millrace.spec import JobSpec
from millrace.spec.trainer import Optimizer
from services.trainer.protocol.backend import Backend, TrainableModel
from services.trainer.protocol.microbatch import MicroBatch
from services.trainer.ranks import collectives
from services.trainer.step.batch import RankBatch
from services.trainer.step.loss import ActorLoss, CriticLoss, LossInputs, Output
from services.trainer.step.metrics import Clock, over_ranks
from services.trainer.step.schedule import critic_learning_rate, learning_rate

CLIP_EPS = 1e-6
_FIX = "Look at that trajectory; lower the learning rate or compute in float32 if its gradient overflowed."


@dataclass(frozen=True)
class UpdateResult:
    metrics: Mapping[str, Mapping[str, float]]
    """Of `actor` and `critic`, those that were updated."""
    logprobs_bt: Tensor | None
    """[rows, longest]: under the weights before this update; 0 in rows that it did not train. None where the policy was
    not updated."""
    mask_bt: Tensor
    """The response tokens of the rows that it trained."""


@dataclass
class ModelUpdate:
    """One of the models with its loss, and the gradient that it gets in this update."""

    name: str
    model: TrainableModel
    optimizer: Optimizer
    lr: float
    says: str
    """What its forward pass gives of each token."""
    backward: Callable[[Sequence[MicroBatch]], list[Output]]
    norm: float = field(default=0.0, init=False)
    scored_bt: Tensor = field(init=False)
    metrics: dict[str, float] = field(default_factory=dict, init=False)


def update(
    spec: JobSpec,
    backend: Backend,
    batch: RankBatch,
    microbatches: Sequence[MicroBatch],
    columns: LossInputs,
    step: int,
    clock: Clock,
) -> UpdateResult:
    """Forward and backward over the micro-batches, then one step of each optimizer. Raises, before anything is written,
    NonFinite where a log-probability, a value or a gradient is NaN or infinite, InvalidJob where a user's own loss
    fails."""
    trained_b = torch.zeros(len(batch.samples), dtype=torch.bool, device=batch.device)
    trained_b[[row for microbatch in microbatches for row in microbatch.rows]] = True
    mask_bt = batch.mask_bt & trained_b[:, None]
    totals = _totals(columns.mask_bt & trained_b[:, None], backend)
    learners = _learners(spec, backend, columns, totals, step)
    try:
        for learner in learners:
            with clock(f"update_{learner.name}"):
                _add_gradient(learner, batch, microbatches, mask_bt, backend)
    except (InvalidJob, NonFinite):
        for learner in learners:
            learner.model.zero_gradients()
        raise
    for learner in learners:
        with clock(f"update_{learner.name}"):
            scale = min(1.0, learner.optimizer.clip_grad_norm / (learner.norm + CLIP_EPS))
            learner.model.optimizer_step(lr=learner.lr, gradient_scale=scale)
    logprobs_bt = next((learner.scored_bt for learner in learners if learner.name == "actor"), None)
    return UpdateResult({learner.name: learner.metrics for learner in learners}, logprobs_bt, mask_bt)


def _learners(
    spec: JobSpec, backend: Backend, columns: LossInputs, totals: BatchTotals, step: int
) -> list[ModelUpdate]:
    """The critic, and once it is warm the policy."""
    critic, chosen, learners = backend.critic, spec.algorithm.critic, []
    if critic is not None and chosen is not None:
        value_loss = CriticLoss(spec, columns, totals)
        learners.append(
            ModelUpdate(
                "critic",
                critic,
                chosen.optimizer,
                critic_learning_rate(spec, step),
                "values",
                lambda microbatches: critic.forward_backward(microbatches, value_loss),
            )
        )
        if step <= chosen.warmup_steps:
            return learners
    loss, temperature = ActorLoss(spec, columns, totals), spec.rollout.temperature
    learners.append(
        ModelUpdate(
            "actor",
            backend,
            spec.trainer.optimizer,
            learning_rate(spec, step),
            "log-probabilities",
            lambda microbatches: backend.forward_backward(microbatches, loss, temperature=temperature),
        )
    )
    return learners


def _add_gradient(
    learner: ModelUpdate, batch: RankBatch, microbatches: Sequence[MicroBatch], mask_bt: Tensor, backend: Backend
) -> None:
    """Raises NonFinite, on all ranks alike, with the trajectory named."""
    outputs = learner.backward(microbatches)
    learner.scored_bt = batch.scattered(microbatches, [output.scored_r for output in outputs])
    with collectives.fail_together():
        check_finite(learner.says, learner.scored_bt, mask_bt, batch.labels)
    learner.norm = learner.model.gradient_norm()
    if not math.isfinite(learner.norm):
        raise _blamed(learner, batch, microbatches)
    shares = over_ranks([output.metrics for output in outputs], backend.data_parallel.group)
    learner.metrics = {**summarised(shares), "grad_norm": learner.norm, "lr": learner.lr}


def _totals(mask_bt: Tensor, backend: Backend) -> BatchTotals:
    """Of the update's tokens that count, over all ranks."""
    mine = BatchTotals.of(mask_bt)
    if backend.data_parallel.group is None:
        return mine
    counts = torch.tensor([mine.tokens, mine.sequences])
    dist.all_reduce(counts, group=backend.data_parallel.group)
    return BatchTotals(*counts.tolist())


def _blamed(learner: ModelUpdate, batch: RankBatch, microbatches: Sequence[MicroBatch]) -> NonFinite:
    """Runs the sequences one by one, each rank its own, until the gradient is not finite again."""
    rows = [row for microbatch in microbatches for row in microbatch.rows]
    whose = f"gradients of the {'policy' if learner.name == 'actor' else learner.name}"
    for turn in range(int(collectives.maxima({"rows": len(rows)})["rows"])):
        mine = rows[turn : turn + 1]
        learner.model.zero_gradients()
        learner.backward([MicroBatch.pack(batch.samples, mine)])
        if not math.isfinite(learner.model.gradient_norm()):
            labels = collectives.gather_bytes("".join(batch.labels[row] for row in mine).encode())
            names = " or ".join(sorted({label.decode() for label in labels if label}))
            return NonFinite(f"{whose}: their norm is {learner.norm} because of {names}.", _FIX)
    return NonFinite(f"{whose}: their norm is {learner.norm}, though no trajectory's alone is.", _FIX)

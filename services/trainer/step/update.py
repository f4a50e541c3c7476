"""One update of the policy, and of the critic where the job has one, on their share of the batch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from millrace.errors import InvalidJob, NonFinite
from millrace.spec import JobSpec
from millrace.spec.trainer import Optimizer
from services.trainer.algorithms.aggregation import BatchTotals
from services.trainer.algorithms.combining import summarised
from services.trainer.algorithms.tokens import check_finite
from services.trainer.memory.meter import MemoryMeter
from services.trainer.protocol.backend import Backend, TrainableModel
from services.trainer.protocol.microbatch import MicroBatch
from services.trainer.ranks import collectives
from services.trainer.step.batch import RankBatch
from services.trainer.step.loss import ActorLoss, CriticLoss, LossOutput
from services.trainer.step.loss_inputs import LossInputs
from services.trainer.step.metrics import Clock, over_ranks
from services.trainer.step.schedule import critic_learning_rate, learning_rate

CLIP_EPS = 1e-6
_FIX = "Look at that trajectory; lower the learning rate or compute in float32 if its gradient overflowed."


@dataclass(frozen=True)
class UpdateResult:
    """Metrics of an update, and the log-probabilities that it computed."""

    metrics: Mapping[str, Mapping[str, float]]
    """Metrics of each model that was updated: `actor`, `critic`."""
    logprobs_bt: Tensor | None
    """Log-probabilities under the weights before this update, [rows, longest]; 0 in rows that it did not train. None
    where the policy was not updated."""
    mask_bt: Tensor
    """The response tokens of the rows that it trained."""


@dataclass
class ModelUpdate:
    """The update of one model: its loss, and the gradient that it gets."""

    name: str
    model: TrainableModel
    optimizer: Optimizer
    lr: float
    microbatches: Sequence[MicroBatch]
    scores: str
    """What its forward pass computes for each token, in words."""
    backward: Callable[[Sequence[MicroBatch]], list[LossOutput]]
    norm: float = field(default=0.0, init=False)
    scored_bt: Tensor = field(init=False)
    metrics: dict[str, float] = field(default_factory=dict, init=False)


def update(
    spec: JobSpec,
    backend: Backend,
    batch: RankBatch,
    number: int,
    inputs: LossInputs,
    step: int,
    clock: Clock,
) -> UpdateResult:
    """Forward and backward over the micro-batches of the step's update `number`, then one step of each optimizer.

    Raises NonFinite where a log-probability, a value or a gradient is NaN or infinite, and InvalidJob where a user's
    own loss fails: no weight has changed then. `clock.meter.updated` is set before the first weight is written.
    """
    trained_b = torch.zeros(len(batch.samples), dtype=torch.bool, device=batch.device)
    trained_b[[row for microbatch in batch.updates[number] for row in microbatch.rows]] = True
    mask_bt = batch.mask_bt & trained_b[:, None]
    kept_bt = inputs.mask_bt & trained_b[:, None]
    totals = _totals(kept_bt, mask_bt if spec.algorithm.count_rejected_sequences else kept_bt, backend)
    models = _model_updates(spec, backend, batch, number, inputs, totals, step, clock.meter)
    try:
        for model_update in models:
            with clock(f"update_{model_update.name}"):
                _add_gradient(model_update, batch, mask_bt, backend)
    except (InvalidJob, NonFinite):
        for model_update in models:
            model_update.model.zero_gradients()
        raise
    for model_update in models:
        with clock(f"update_{model_update.name}"):
            model_update.model.prepare_update()
    clock.meter.updated = True  # an optimizer that runs out of memory may have written a part of the weights
    for model_update in models:
        with clock(f"update_{model_update.name}"):
            scale = min(1.0, model_update.optimizer.clip_grad_norm / (model_update.norm + CLIP_EPS))
            model_update.model.optimizer_step(lr=model_update.lr, gradient_scale=scale)
    logprobs_bt = next((model_update.scored_bt for model_update in models if model_update.name == "actor"), None)
    return UpdateResult({model_update.name: model_update.metrics for model_update in models}, logprobs_bt, mask_bt)


def _model_updates(
    spec: JobSpec,
    backend: Backend,
    batch: RankBatch,
    number: int,
    inputs: LossInputs,
    totals: BatchTotals,
    step: int,
    meter: MemoryMeter,
) -> list[ModelUpdate]:
    """The update of the critic, and, after the critic's warm-up, of the policy."""
    critic, chosen, models = backend.critic, spec.algorithm.critic, []
    if critic is not None and chosen is not None:
        value_loss = meter.watched(CriticLoss(spec, inputs, totals))
        own_batches = batch.repacked(spec.trainer.of("critic").token_budget, critic.cost)[number]
        models.append(
            ModelUpdate(
                "critic",
                critic,
                chosen.optimizer,
                critic_learning_rate(spec, step),
                own_batches,
                "values",
                lambda microbatches: critic.forward_backward(microbatches, value_loss),
            )
        )
        if step <= chosen.warmup_steps:
            return models
    loss, temperature = meter.watched(ActorLoss(spec, inputs, totals)), spec.rollout.temperature
    models.append(
        ModelUpdate(
            "actor",
            backend,
            spec.trainer.optimizer,
            learning_rate(spec, step),
            batch.updates[number],
            "log-probabilities",
            lambda microbatches: backend.forward_backward(microbatches, loss, temperature=temperature),
        )
    )
    return models


def _add_gradient(model_update: ModelUpdate, batch: RankBatch, mask_bt: Tensor, backend: Backend) -> None:
    """Computes a model's gradient. Raises NonFinite with the trajectory named, on every rank the same."""
    microbatches = model_update.microbatches
    outputs = model_update.backward(microbatches)
    model_update.scored_bt = batch.from_microbatches(microbatches, [output.scored_r for output in outputs])
    with collectives.fail_together():
        check_finite(model_update.scores, model_update.scored_bt, mask_bt, batch.labels)
    model_update.norm = model_update.model.gradient_norm()
    if not math.isfinite(model_update.norm):
        raise _non_finite_gradient(model_update, batch)
    shares = over_ranks([output.metrics for output in outputs], backend.data_parallel.group)
    model_update.metrics = {**summarised(shares), "grad_norm": model_update.norm, "lr": model_update.lr}


def _totals(kept_bt: Tensor, counted_bt: Tensor, backend: Backend) -> BatchTotals:
    """Counts over all ranks: the update's tokens of `kept_bt`, and the sequences that have a token in `counted_bt`."""
    mine = BatchTotals(BatchTotals.of(kept_bt).tokens, BatchTotals.of(counted_bt).sequences)
    if backend.data_parallel.group is None:
        return mine
    counts = torch.tensor([mine.tokens, mine.sequences])
    dist.all_reduce(counts, group=backend.data_parallel.group)
    return BatchTotals(*counts.tolist())


def _non_finite_gradient(model_update: ModelUpdate, batch: RankBatch) -> NonFinite:
    """The error that names the trajectory whose gradient is not finite: every rank runs its sequences one by one."""
    rows = [row for microbatch in model_update.microbatches for row in microbatch.rows]
    whose = f"gradients of the {'policy' if model_update.name == 'actor' else model_update.name}"
    for turn in range(int(collectives.maxima({"rows": len(rows)})["rows"])):
        mine = rows[turn : turn + 1]
        model_update.model.zero_gradients()
        model_update.backward([MicroBatch.pack(batch.samples, mine)])
        if not math.isfinite(model_update.model.gradient_norm()):
            labels = collectives.gather_bytes("".join(batch.labels[row] for row in mine).encode())
            names = " or ".join(sorted({label.decode() for label in labels if label}))
            return NonFinite(f"{whose}: their norm is {model_update.norm} because of {names}.", _FIX)
    return NonFinite(
        f"{whose}: their norm is {model_update.norm}, though that of each single trajectory is finite.", _FIX
    )

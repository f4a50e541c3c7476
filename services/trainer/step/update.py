"""One update of the policy, and of the critic if the job has one, on their share of the step's groups."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from millrace.errors import NonFinite
from millrace.spec import JobSpec
from millrace.spec.trainer import Optimizer
from services.trainer.algorithms.aggregation import HISTOGRAM, BatchTotals, Rule, rescaling, rule_of, summarised
from services.trainer.algorithms.losses import LOSSES
from services.trainer.algorithms.tokens import check_finite
from services.trainer.memory.meter import MemoryMeter
from services.trainer.protocol.backend import Backend, TrainableModel
from services.trainer.protocol.microbatch import MicroBatch
from services.trainer.ranks import collectives
from services.trainer.step.batch import RankBatch
from services.trainer.step.loss import ActorLoss, CriticLoss, LossOutput
from services.trainer.step.loss_inputs import LossInputs
from services.trainer.step.metrics import over_ranks
from services.trainer.step.phases import Clock
from services.trainer.step.schedule import critic_learning_rate, learning_rate

CLIP_EPS = 1e-6
_FIX = "Look at that trajectory; lower the learning rate or compute in float32 if its gradient overflowed."

Backward = Callable[[Sequence[MicroBatch], bool], list[LossOutput]]
"""Adds the gradient of micro-batches; true: further calls add to the same gradient."""


@dataclass(frozen=True)
class UpdateResult:
    """Metrics of an update, and the log-probabilities that it computed."""

    metrics: Mapping[str, Mapping[str, float]]
    """Metrics of each model that was updated: `actor`, `critic`."""
    logprobs: Mapping[RankBatch, Tensor]
    """The log-probabilities of each batch whose rows it trained, under the weights before this update, [rows, longest];
    0 in rows that it did not train. Empty if the policy was not updated."""
    masks: Mapping[RankBatch, Tensor]
    """The sampled tokens of the rows that it trained, for each batch."""


@dataclass(frozen=True)
class Pass:
    """A forward and backward pass of a model over its micro-batches of one batch."""

    batch: RankBatch
    microbatches: Sequence[MicroBatch]
    backward: Backward
    scored_bt: Tensor
    """What the forward pass computed for each token."""
    metrics: Sequence[Mapping[str, Tensor]]
    """Contributions of each micro-batch."""


@dataclass
class ModelUpdate:
    """The update of one model: the gradient that it gets pass by pass."""

    name: str
    model: TrainableModel
    optimizer: Optimizer
    lr: float
    scores: str
    """What its forward pass computes for each token, in words."""
    microbatches: Callable[[RankBatch], Sequence[MicroBatch]]
    backward: Callable[[LossInputs, BatchTotals], Backward]
    passes: list[Pass] = field(default_factory=list, init=False)
    norm: float = field(default=0.0, init=False)
    metrics: dict[str, float] = field(default_factory=dict, init=False)


class Update:
    """An update whose gradient is added up batch by batch, before one step of each optimizer.

    The losses divide by counts of all tokens of the update, which are known only with its last batch. Until then they
    divide by those of the first batch, and `finish` corrects gradient and metrics. All terms of a loss have the same
    divisor. With a single batch the two are equal, and the factor is exactly 1.
    """

    def __init__(self, spec: JobSpec, backend: Backend, number: int, step: int, clock: Clock) -> None:
        """`number`: of the update in the step."""
        self.number = number
        self._spec = spec
        self._backend = backend
        self._clock = clock
        self._models = _model_updates(spec, backend, number, step, clock.meter)
        self._assumed: BatchTotals | None = None
        self._totals = BatchTotals(0, 0)
        self._masks: dict[RankBatch, Tensor] = {}

    def add(self, batch: RankBatch, inputs: LossInputs, *, more: bool) -> None:
        """Forward and backward over the batch's micro-batches of this update. `more`: further batches follow.

        Raises NonFinite if a log-probability or a value is NaN or infinite, and InvalidJob if a user's own loss
        fails.
        """
        trained_b = torch.zeros(len(batch.samples), dtype=torch.bool, device=batch.device)
        trained_b[[row for microbatch in batch.updates[self.number] for row in microbatch.rows]] = True
        mask_bt = self._masks[batch] = batch.mask_bt & trained_b[:, None]
        kept_bt = inputs.mask_bt & trained_b[:, None]
        counted_bt = mask_bt if self._spec.algorithm.count_rejected_sequences else kept_bt
        totals = _totals(kept_bt, counted_bt, self._backend)
        self._assumed, self._totals = self._assumed or totals, self._totals + totals
        for each in self._models:
            with self._clock(f"update_{each.name}"):
                microbatches, backward = each.microbatches(batch), each.backward(inputs, self._assumed)
                outputs = backward(microbatches, more)
                scored_bt = batch.from_microbatches(microbatches, [output.scored_r for output in outputs])
                with collectives.fail_together():
                    check_finite(each.scores, scored_bt, mask_bt, batch.labels)
                metrics = [output.metrics for output in outputs]
                each.passes.append(Pass(batch, microbatches, backward, scored_bt, metrics))

    def finish(self) -> UpdateResult:
        """One step of each optimizer.

        Raises NonFinite if a gradient is NaN or infinite: no weight has changed then. `clock.meter.updated` is set
        before the first weight is written.
        """
        assert self._assumed is not None, "an update has at least one batch"
        factor = rescaling(self._spec.algorithm.aggregation, self._assumed, self._totals)
        for each in self._models:
            with self._clock(f"update_{each.name}"):
                each.norm = each.model.gradient_norm() * factor
                if not math.isfinite(each.norm):
                    raise _non_finite_gradient(each)
                each.metrics = self._metrics(each, factor)
        for each in self._models:
            with self._clock(f"update_{each.name}"):
                each.model.prepare_update()
        self._clock.meter.updated = True  # an optimizer that runs out of memory may have written a part of the weights
        for each in self._models:
            with self._clock(f"update_{each.name}"):
                clipped = min(1.0, each.optimizer.clip_grad_norm / (each.norm + CLIP_EPS))
                each.model.optimizer_step(lr=each.lr, gradient_scale=clipped * factor)
        passes = next((each.passes for each in self._models if each.name == "actor"), [])
        logprobs = {each.batch: each.scored_bt for each in passes}
        return UpdateResult({each.name: each.metrics for each in self._models}, logprobs, self._masks)

    def _metrics(self, of: ModelUpdate, factor: float) -> dict[str, float]:
        """The metrics of a model's passes; `factor` is that of its loss. A collective."""
        assert self._assumed is not None
        shares = over_ranks([one for each in of.passes for one in each.metrics], self._backend.data_parallel.group)
        of_tokens = rescaling("token-mean", self._assumed, self._totals)
        for name, value in shares.items():
            if rule_of(name) is Rule.SUM and name != HISTOGRAM:
                shares[name] = value * (factor if name in LOSSES else of_tokens)
        return {**summarised(shares), "grad_norm": of.norm, "lr": of.lr}


def _model_updates(
    spec: JobSpec, backend: Backend, number: int, step: int, meter: MemoryMeter
) -> Sequence[ModelUpdate]:
    """The update of the critic, and, after the critic's warm-up, of the policy."""
    critic, chosen, models = backend.critic, spec.algorithm.critic, list[ModelUpdate]()
    if critic is not None and chosen is not None:
        budget = spec.trainer.of("critic").token_budget

        def critic_backward(inputs: LossInputs, totals: BatchTotals) -> Backward:
            loss = meter.watched(CriticLoss(spec, inputs, totals))
            return lambda microbatches, more: critic.forward_backward(microbatches, loss, more=more)

        models.append(
            ModelUpdate(
                "critic",
                critic,
                chosen.optimizer,
                critic_learning_rate(spec, step),
                "values",
                lambda batch: batch.repacked(budget, critic.cost)[number],
                critic_backward,
            )
        )
        if step <= chosen.warmup_steps:
            return models

    def actor_backward(inputs: LossInputs, totals: BatchTotals) -> Backward:
        loss, temperature = meter.watched(ActorLoss(spec, inputs, totals)), spec.rollout.temperature
        return lambda microbatches, more: backend.forward_backward(
            microbatches, loss, temperature=temperature, more=more
        )

    models.append(
        ModelUpdate(
            "actor",
            backend,
            spec.trainer.optimizer,
            learning_rate(spec, step),
            "log-probabilities",
            lambda batch: batch.updates[number],
            actor_backward,
        )
    )
    return models


def _totals(kept_bt: Tensor, counted_bt: Tensor, backend: Backend) -> BatchTotals:
    """Counts over all ranks: the tokens of `kept_bt`, and the sequences that have a token in `counted_bt`."""
    mine = BatchTotals(BatchTotals.of(kept_bt).tokens, BatchTotals.of(counted_bt).sequences)
    if backend.data_parallel.group is None:
        return mine
    counts = torch.tensor([mine.tokens, mine.sequences])
    dist.all_reduce(counts, group=backend.data_parallel.group)
    return BatchTotals(*counts.tolist())


def _non_finite_gradient(of: ModelUpdate) -> NonFinite:
    """The error that names the trajectory whose gradient is not finite: every rank runs its sequences one by one."""
    whose = f"gradients of the {'policy' if of.name == 'actor' else of.name}"
    for each in of.passes:
        batch, rows = each.batch, [row for microbatch in each.microbatches for row in microbatch.rows]
        for turn in range(int(collectives.maxima({"rows": len(rows)})["rows"])):
            mine = rows[turn : turn + 1]
            of.model.zero_gradients()
            each.backward([MicroBatch.pack(batch.samples, mine)], False)
            if not math.isfinite(of.model.gradient_norm()):
                labels = collectives.gather_bytes("".join(batch.labels[row] for row in mine).encode())
                names = " or ".join(sorted({label.decode() for label in labels if label}))
                return NonFinite(f"{whose}: their norm is {of.norm} because of {names}.", _FIX)
    return NonFinite(f"{whose}: their norm is {of.norm}, though that of each single trajectory is finite.", _FIX)

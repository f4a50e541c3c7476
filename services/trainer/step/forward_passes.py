"""Forward passes before the updates of a step: log-probabilities of policy and reference, values of the critic."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from millrace.spec import JobSpec
from millrace.spec.passes import StepPasses
from services.trainer.algorithms.tokens import check_finite
from services.trainer.protocol.backend import Backend
from services.trainer.protocol.microbatch import MicroBatch
from services.trainer.ranks import collectives
from services.trainer.step.batch import RankBatch
from services.trainer.step.phases import Clock


@dataclass(frozen=True)
class ForwardResults:
    """Results of the forward passes for this rank's rows, [rows, longest]; None for a pass that was not made."""

    train_bt: Tensor | None
    """Log-probabilities under the weights that the step begins with."""
    ref_bt: Tensor | None
    """Log-probabilities under the reference."""
    values_bt: Tensor | None = None
    """Values of the critic."""
    sum_pi_squared_bt: Tensor | None = None
    """Σ π² over the vocabulary, under the weights that the step begins with."""
    entropy_bt: Tensor | None = None
    """Entropies, nats, under the weights that the step begins with."""


def run_passes(spec: JobSpec, backend: Backend, batch: RankBatch, needed: StepPasses, clock: Clock) -> ForwardResults:
    """Makes the needed passes. Raises NonFinite."""
    temperature = spec.rollout.temperature

    def logprobs(at: float, reference: bool = False) -> Tensor:
        what, updates = "log-probabilities", batch.updates
        if reference:
            what += " of the reference"
            updates = batch.repacked(spec.trainer.of("reference").token_budget, backend.cost)
        return _scored(
            batch, what, updates, lambda batches: backend.logprobs(batches, temperature=at, reference=reference)
        )

    train_bt = ref_bt = values_bt = squares_bt = entropy_bt = None
    with clock("old_log_prob"):
        if needed.entropies:
            train_bt, entropy_bt = _scored_with_entropies(batch, backend, temperature)
        elif needed.train:
            train_bt = logprobs(temperature)
        if train_bt is not None and needed.sum_pi_squared:
            # With Z(τ) = Σ exp(logits/τ), Σ π² is Z(τ/2)/Z(τ)²: a token's log-probabilities at τ and τ/2 give it.
            squares_bt = (2 * train_bt - logprobs(temperature / 2)).exp()
    with clock("ref"):
        if needed.reference:
            ref_bt = logprobs(temperature, reference=True)
    if needed.values:
        critic = backend.critic
        assert critic is not None
        with clock("values"):
            updates = batch.repacked(spec.trainer.of("critic").token_budget, critic.cost)
            values_bt = _scored(batch, "values", updates, critic.values)
    return ForwardResults(train_bt, ref_bt, values_bt, squares_bt, entropy_bt)


def _scored_with_entropies(batch: RankBatch, backend: Backend, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of all of this rank's rows, from one pass. Raises NonFinite as `_scored`."""
    entropies: list[Tensor] = []

    def score(microbatches: Sequence[MicroBatch]) -> list[Tensor]:
        scores = backend.scores(microbatches, temperature=temperature)
        entropies.extend(each.entropy_r for each in scores if each.entropy_r is not None)
        return [each.logprobs_r for each in scores]

    train_bt = _scored(batch, "log-probabilities", batch.updates, score)
    return train_bt, _scored(batch, "entropies", batch.updates, lambda _: entropies)


def _scored(
    batch: RankBatch,
    what: str,
    updates: Mapping[int, Sequence[MicroBatch]],
    score: Callable[[Sequence[MicroBatch]], list[Tensor]],
) -> Tensor:
    """The scores of all of this rank's rows, [rows, longest], from the micro-batches of all updates. Raises NonFinite
    on every rank if one score is NaN or infinite."""
    microbatches = [microbatch for microbatches in updates.values() for microbatch in microbatches]
    scored_bt = batch.from_microbatches(microbatches, score(microbatches))
    with collectives.fail_together():
        check_finite(what, scored_bt, batch.mask_bt, batch.labels)
    return scored_bt

"""The policy's and the critic's loss on one micro-batch, exact over all micro-batches and ranks."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from millrace.rl.aggregation import BatchTotals, aggregate
from millrace.rl.formulas import segments
from millrace.rl.formulas.divergence import kl
from millrace.rl.policy_losses import entropy_bonus, policy_loss
from millrace.rl.value_loss import value_loss
from millrace.spec import JobSpec
from services.trainer.protocol.backend import TokenScores
from services.trainer.protocol.microbatch import MicroBatch


@dataclass(frozen=True)
class LossInputs:
    """What the loss reads of each of this rank's rows, [rows, longest]."""

    mask_bt: Tensor
    """Tokens that count: generated, and kept by the correction."""
    advantages_bt: Tensor
    rollout_bt: Tensor
    old_bt: Tensor | None
    """Log-probabilities of the proximal policy; none where that is the policy itself as it stands before its only
    update, so that its own values are taken."""
    ref_bt: Tensor | None
    weights_bt: Tensor | None
    picked_bt: Tensor | None
    values_bt: Tensor | None = None
    """The critic's before the step."""
    returns_bt: Tensor | None = None
    """What the critic learns to predict."""

    def of(self, batch: MicroBatch, name: str) -> Tensor | None:
        """A micro-batch's rows, cut to its longest response."""
        column = getattr(self, name)
        return None if column is None else column[list(batch.rows), : max(batch.response_lengths)]


@dataclass(frozen=True)
class Output:
    """What comes back of a micro-batch, beside its loss."""

    scored_r: Tensor
    """What the forward pass gave of each response token: log-probabilities, or the critic's values."""
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class ActorLoss:
    """A `LossFn`: clipped policy loss, KL to the reference, entropy bonus."""

    spec: JobSpec
    columns: LossInputs
    totals: BatchTotals
    """Of the update's tokens that count, on all ranks."""

    def __call__(self, batch: MicroBatch, scores: TokenScores) -> tuple[Tensor, Output]:
        logprobs_r = scores.logprobs_r.detach()
        if not sum(batch.response_lengths):
            return scores.logprobs_r.sum(), Output(logprobs_r, {})
        assert scores.entropy_r is not None
        algorithm, columns = self.spec.algorithm, self.columns
        logprobs_bt = segments.unpack(scores.logprobs_r, batch.response_lengths)
        entropy_bt = segments.unpack(scores.entropy_r, batch.response_lengths)
        mask_bt, advantages_bt = columns.of(batch, "mask_bt"), columns.of(batch, "advantages_bt")
        assert mask_bt is not None and advantages_bt is not None
        old_bt = columns.of(batch, "old_bt")
        how: dict[str, Any] = {
            "aggregation": algorithm.aggregation,
            "totals": self.totals,
            "horizon": self.spec.rollout.max_response_tokens,
        }
        further: dict[str, Any] = {
            "behaviour_logprobs_bt": columns.of(batch, "rollout_bt"),
            "picked_bt": columns.of(batch, "picked_bt"),
        }
        loss, metrics = policy_loss(
            algorithm.policy_loss.name,
            logprobs_bt=logprobs_bt,
            old_logprobs_bt=logprobs_bt.detach() if old_bt is None else old_bt,
            advantages_bt=advantages_bt,
            mask_bt=mask_bt,
            weights_bt=columns.of(batch, "weights_bt"),
            entropy_bt=entropy_bt,
            **how,
            **{name: tensor for name, tensor in further.items() if tensor is not None},
            **algorithm.policy_loss.options,
        )
        if algorithm.entropy_coefficient:
            loss = loss + entropy_bonus(entropy_bt, mask_bt, coefficient=algorithm.entropy_coefficient, **how)
        ref_bt = columns.of(batch, "ref_bt")
        if algorithm.kl is not None and algorithm.kl_in == "loss" and ref_bt is not None:
            kl_loss = self._kl(logprobs_bt, ref_bt, mask_bt)
            loss, metrics["kl_loss"] = loss + algorithm.kl_coefficient * kl_loss, kl_loss.detach()
        return loss, Output(logprobs_r, metrics)

    def _kl(self, logprobs_bt: Tensor, ref_bt: Tensor, mask_bt: Tensor) -> Tensor:
        algorithm = self.spec.algorithm
        assert algorithm.kl is not None
        return aggregate(
            algorithm.aggregation,
            kl(algorithm.kl.name, logprobs_bt, ref_bt),
            mask_bt,
            totals=self.totals,
            horizon=self.spec.rollout.max_response_tokens,
        )


@dataclass(frozen=True)
class CriticLoss:
    """A `ValueLossFn`: half the squared distance to the returns, clipped around the values before the step."""

    spec: JobSpec
    columns: LossInputs
    totals: BatchTotals
    """As the actor's."""

    def __call__(self, batch: MicroBatch, values_r: Tensor) -> tuple[Tensor, Output]:
        if not sum(batch.response_lengths):
            return values_r.sum(), Output(values_r.detach(), {})
        mask_bt, values_bt, returns_bt = (
            self.columns.of(batch, name) for name in ("mask_bt", "values_bt", "returns_bt")
        )
        assert mask_bt is not None and values_bt is not None and returns_bt is not None
        assert self.spec.algorithm.critic is not None
        loss, metrics = value_loss(
            values_bt=segments.unpack(values_r, batch.response_lengths),
            old_values_bt=values_bt,
            returns_bt=returns_bt,
            mask_bt=mask_bt,
            clip=self.spec.algorithm.critic.clip,
            aggregation=self.spec.algorithm.aggregation,
            totals=self.totals,
            horizon=self.spec.rollout.max_response_tokens,
        )
        return loss, Output(values_r.detach(), metrics)

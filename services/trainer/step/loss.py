"""Losses of the policy and of the critic on one micro-batch, exact over all micro-batches and ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.rl.formulas.divergence import kl
from millrace.spec import JobSpec
from millrace.spec.algorithm import Distillation
from services.trainer.algorithms.aggregation import BatchTotals, aggregate
from services.trainer.algorithms.losses import distillation_loss, entropy_bonus, policy_loss, value_loss
from services.trainer.algorithms.tokens import off_policy, unpack
from services.trainer.protocol.backend import TokenScores
from services.trainer.protocol.microbatch import MicroBatch
from services.trainer.step.loss_inputs import LossInputs


@dataclass(frozen=True)
class LossOutput:
    """What a loss returns for a micro-batch, besides its value."""

    scored_r: Tensor
    """Result of the forward pass for each sampled token: log-probabilities, or the critic's values."""
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class ActorLoss:
    """The loss of the policy, a `LossFn`: clipped policy loss, KL to the reference, distillation, entropy bonus."""

    spec: JobSpec
    inputs: LossInputs
    totals: BatchTotals
    """Counts of the update's tokens that count, over all ranks."""

    def __call__(self, batch: MicroBatch, scores: TokenScores) -> tuple[Tensor, LossOutput]:
        logprobs_r = scores.logprobs_r.detach()
        if not sum(batch.sampled_lengths):
            return scores.logprobs_r.sum(), LossOutput(logprobs_r, {})
        assert scores.entropy_r is not None
        algorithm, inputs = self.spec.algorithm, self.inputs.rows_of(batch)
        logprobs_bt = unpack(scores.logprobs_r, batch.sampled_lengths)
        entropy_bt = unpack(scores.entropy_r, batch.sampled_lengths)
        optional = {"behaviour_logprobs_bt": inputs.rollout_bt, "selected_bt": inputs.selected_bt}
        horizon = self.spec.rollout.max_response_tokens
        weights_bt, off_policy_share = self._weights(inputs, logprobs_bt)
        loss, metrics = policy_loss(
            algorithm.policy_loss.name,
            logprobs_bt=logprobs_bt,
            old_logprobs_bt=logprobs_bt.detach() if inputs.old_bt is None else inputs.old_bt,
            advantages_bt=inputs.advantages_bt,
            mask_bt=inputs.mask_bt,
            weights_bt=weights_bt,
            entropy_bt=entropy_bt,
            aggregation=algorithm.aggregation,
            totals=self.totals,
            horizon=horizon,
            **{name: tensor for name, tensor in optional.items() if tensor is not None},
            **algorithm.policy_loss.options,
        )
        metrics |= off_policy_share
        if algorithm.distillation is not None and not algorithm.distillation.use_rewards:
            loss = torch.zeros_like(loss)  # the policy loss of the rewards is only reported
        if algorithm.entropy_coefficient:
            loss = loss + entropy_bonus(
                entropy_bt,
                inputs.mask_bt,
                coefficient=algorithm.entropy_coefficient,
                aggregation=algorithm.aggregation,
                totals=self.totals,
                horizon=horizon,
            )
        if algorithm.kl is not None and algorithm.kl_in == "loss" and inputs.ref_bt is not None:
            divergence_bt = kl(algorithm.kl.name, logprobs_bt, inputs.ref_bt)
            kl_loss = aggregate(
                algorithm.aggregation, divergence_bt, inputs.mask_bt, totals=self.totals, horizon=horizon
            )
            loss, metrics["kl_loss"] = loss + algorithm.kl_coefficient * kl_loss, kl_loss.detach()
        if algorithm.distillation is not None:
            distilled, told = self._distilled(algorithm.distillation, batch, scores, inputs, logprobs_bt)
            loss, metrics = loss + algorithm.distillation.coefficient * distilled, metrics | told
        return loss, LossOutput(logprobs_r, metrics)

    def _distilled(
        self, chosen: Distillation, batch: MicroBatch, scores: TokenScores, inputs: LossInputs, logprobs_bt: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss that brings the policy nearer to the teacher, before its coefficient, and its metrics."""
        assert inputs.teacher_bt is not None
        others_rk = scores.others_rk
        return distillation_loss(
            chosen.loss.name,
            logprobs_bt=logprobs_bt,
            old_logprobs_bt=logprobs_bt.detach() if inputs.old_bt is None else inputs.old_bt,
            teacher_logprobs_bt=inputs.teacher_bt,
            mask_bt=inputs.mask_bt,
            weights_bt=inputs.weights_bt,
            top_logprobs_btk=None if others_rk is None else unpack(others_rk, batch.sampled_lengths),
            teacher_top_logprobs_btk=inputs.teacher_top_btk,
            aggregation=self.spec.algorithm.aggregation,
            totals=self.totals,
            horizon=self.spec.rollout.max_response_tokens,
            **chosen.loss.options,
        )

    def _weights(self, inputs: LossInputs, logprobs_bt: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The weights of the tokens' policy loss: the correction's, 0 for tokens of low entropy and for what
        `off_policy_limit` masks. With the share of what that masks."""
        weights_bt, limit = inputs.weights_bt, self.spec.algorithm.off_policy_limit
        if inputs.high_entropy_bt is not None:
            high_bt = inputs.high_entropy_bt.to(inputs.advantages_bt.dtype)
            weights_bt = high_bt if weights_bt is None else weights_bt * high_bt
        if limit is None:
            return weights_bt, {}
        mask_bt = inputs.mask_bt
        is_off_bt = off_policy(logprobs_bt, inputs.rollout_bt, inputs.advantages_bt, mask_bt, limit)
        weights_bt = torch.ones_like(inputs.advantages_bt) if weights_bt is None else weights_bt
        share = aggregate("token-mean", is_off_bt.to(weights_bt.dtype), mask_bt, totals=self.totals)
        return weights_bt.masked_fill(is_off_bt, 0), {"off_policy_fraction": share}


@dataclass(frozen=True)
class CriticLoss:
    """The loss of the critic, a `ValueLossFn`: half the squared distance to the returns, clipped around the values
    before the step."""

    spec: JobSpec
    inputs: LossInputs
    totals: BatchTotals
    """Counts of the update's tokens that count, over all ranks."""

    def __call__(self, batch: MicroBatch, values_r: Tensor) -> tuple[Tensor, LossOutput]:
        if not sum(batch.sampled_lengths):
            return values_r.sum(), LossOutput(values_r.detach(), {})
        inputs = self.inputs.rows_of(batch)
        assert inputs.values_bt is not None and inputs.returns_bt is not None
        assert self.spec.algorithm.critic is not None
        loss, metrics = value_loss(
            values_bt=unpack(values_r, batch.sampled_lengths),
            old_values_bt=inputs.values_bt,
            returns_bt=inputs.returns_bt,
            mask_bt=inputs.mask_bt,
            clip=self.spec.algorithm.critic.clip,
            aggregation=self.spec.algorithm.aggregation,
            totals=self.totals,
            horizon=self.spec.rollout.max_response_tokens,
        )
        return loss, LossOutput(values_r.detach(), metrics)

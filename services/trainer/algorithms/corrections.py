"""Importance weights and rejected tokens of a batch, by the corrections that the job names; and metrics of how far the
engine's policy is from the trainer's, under verl's names (`rollout_corr/*`).

w = π_train/π_rollout is the ratio of a token. The metrics' means are contributions to the batch's means, see
`combining`, which also computes `rollout_is_std` and `rollout_is_eff_sample_size` from the means here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from millrace.errors import InvalidJob
from millrace.rl.formulas.ratios import clamped, sequence_mean
from millrace.rl.registry.catalogue import AlgorithmKind
from services.trainer.algorithms.aggregation import BatchTotals, Rule, aggregate, rule_of
from services.trainer.algorithms.functions import call_algorithm

PREFIX = "rollout_corr/"


@torch.no_grad()
def mismatch_metrics(
    train_logprobs_bt: Tensor, rollout_logprobs_bt: Tensor, mask_bt: Tensor, totals: BatchTotals | None = None
) -> dict[str, Tensor]:
    """Metrics of two policies on the same tokens; all tensors are [B, T]. They do not depend on a correction.

    `kl` and `k3_kl` estimate KL(rollout‖train) by k1 and k3. `chi2_token` and `chi2_seq` are means of w² − 1, where w
    is a token's ratio or the product of a sequence's ratios. `*_ppl` are means over sequences of
    exp(−mean log-probability); `log_ppl_diff` is the mean of a sequence's log(training_ppl/rollout_ppl).
    """
    mask_bt = mask_bt.bool()
    totals = totals or BatchTotals.of(mask_bt)
    log_ratio_bt = (train_logprobs_bt - rollout_logprobs_bt).masked_fill(~mask_bt, 0)
    present_b = mask_bt.any(dim=-1)
    train_b = -sequence_mean(train_logprobs_bt, mask_bt)[:, 0]
    rollout_b = -sequence_mean(rollout_logprobs_bt, mask_bt)[:, 0]
    difference_b = train_b - rollout_b
    by_token = {
        "kl": -log_ratio_bt,
        "k3_kl": torch.expm1(clamped(log_ratio_bt)) - log_ratio_bt,
        "chi2_token": torch.expm1(2 * clamped(log_ratio_bt)),
    }
    by_sequence = {
        "training_ppl": train_b.exp(),
        "training_log_ppl": train_b,
        "rollout_ppl": rollout_b.exp(),
        "rollout_log_ppl": rollout_b,
        "log_ppl_diff": difference_b,
        "log_ppl_abs_diff": difference_b.abs(),
        "ppl_ratio": difference_b.exp(),
        "chi2_seq": torch.expm1(2 * clamped(log_ratio_bt.sum(dim=-1))),
    }
    metrics = {name: aggregate("token-mean", value_bt, mask_bt, totals=totals) for name, value_bt in by_token.items()}
    for name, value_b in by_sequence.items():
        metrics[name] = value_b.masked_fill(~present_b, 0).sum() / max(totals.sequences, 1)
    metrics["log_ppl_diff_max"] = difference_b.masked_fill(~present_b, -torch.inf).amax()
    metrics["log_ppl_diff_min"] = difference_b.masked_fill(~present_b, torch.inf).amin()
    return {PREFIX + name: value for name, value in metrics.items()}


def weight_metrics(weights_bt: Tensor, mask_bt: Tensor, totals: BatchTotals) -> dict[str, Tensor]:
    """Metrics of a correction's weights as they are applied, [B, T].

    Mean, mean square and extremes over tokens; mean and extremes of the sequences' mean weights.
    """
    sequence_b = sequence_mean(weights_bt, mask_bt)[:, 0]
    present_b = mask_bt.any(dim=-1)
    metrics = {
        "rollout_is_mean": aggregate("token-mean", weights_bt, mask_bt, totals=totals),
        "rollout_is_mean_square": aggregate("token-mean", weights_bt.square(), mask_bt, totals=totals),
        "rollout_is_max": weights_bt.masked_fill(~mask_bt, -torch.inf).amax(),
        "rollout_is_min": weights_bt.masked_fill(~mask_bt, torch.inf).amin(),
        "rollout_is_seq_mean": sequence_b.masked_fill(~present_b, 0).sum() / max(totals.sequences, 1),
        "rollout_is_seq_max": sequence_b.masked_fill(~present_b, -torch.inf).amax(),
        "rollout_is_seq_min": sequence_b.masked_fill(~present_b, torch.inf).amin(),
    }
    return {PREFIX + name: value for name, value in metrics.items()}


SMALLEST_MEAN = 1e-8
"""Weights with a smaller mean are not divided by it, as in verl."""


@dataclass(frozen=True)
class Corrected:
    """What the corrections of a job make of a batch, or of a part of it; all tensors are [B, T]."""

    weights_bt: Tensor
    """Importance weights, 0 where the mask is false; `policy_loss` takes them."""
    keep_bt: Tensor
    """bool: the mask of the loss from here on. Tokens that are not kept leave the loss and the count of tokens in its
    totals. Whether sequences that are rejected whole still count is the caller's choice: in verl and NeMo-RL they
    do."""
    _train_bt: Tensor
    _rollout_bt: Tensor
    _mask_bt: Tensor
    _applied: "_Applied"
    _factor: Tensor | None
    """What the weights were divided by; None if they were not normalised."""

    @torch.no_grad()
    def metrics(self, totals: BatchTotals) -> dict[str, Tensor]:
        """Contributions to the metrics of a batch with these counts, scalars named `rollout_corr/*`, which combine with
        `aggregation.combined`. The metrics of weights are those before they were normalised."""
        mask_bt, applied = self._mask_bt, self._applied
        metrics = mismatch_metrics(self._train_bt, self._rollout_bt, mask_bt, totals)
        if applied.weights is not None:
            metrics |= weight_metrics(applied.weights.expand_as(mask_bt), mask_bt, totals)
        for key, values in applied.metrics.items():
            rule, values = rule_of(PREFIX + key), values.to(self._train_bt.dtype)
            metrics[PREFIX + key] = _reduced(rule, values, mask_bt, totals)
        if self._factor is not None:
            metrics[PREFIX + "rollout_is_batch_norm_factor"] = self._factor
        return metrics


@torch.no_grad()
def correct(
    corrections: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    train_logprobs_bt: Tensor,
    rollout_logprobs_bt: Tensor,
    mask_bt: Tensor,
    normalize: bool = False,
) -> Corrected:
    """Applies corrections, each given as name and options.

    Every correction reads all tokens of the mask, as in verl. A token stays where each of them keeps it, and at most
    one of them gives weights.

    train_logprobs_bt, rollout_logprobs_bt: [B, T]; log-probabilities of the same tokens under the same version of the
        weights, by the trainer and by the engine.
    mask_bt: [B, T], true on tokens that count.
    normalize: divide the weights by their mean over the batch: over tokens, or over sequences if a sequence has one
        weight. The tensors have to be the whole batch.

    Raises InvalidJob for an unknown name or option and for two corrections that give weights.
    """
    mask_bt = mask_bt.bool()
    train_bt = train_logprobs_bt.masked_fill(~mask_bt, 0)
    rollout_bt = rollout_logprobs_bt.masked_fill(~mask_bt, 0)
    applied = _apply(corrections, train_bt, rollout_bt, mask_bt)
    weights_bt, factor = torch.ones_like(train_bt), None
    if applied.weights is not None:
        weights_bt = applied.weights.expand_as(train_bt)
    if normalize and applied.weights is not None:
        factor = _mean(applied.weights, mask_bt)
        weights_bt = weights_bt / factor
    weights_bt = weights_bt.masked_fill(~mask_bt, 0)
    return Corrected(weights_bt, applied.keep_bt, train_bt, rollout_bt, mask_bt, applied, factor)


@dataclass(frozen=True)
class _Applied:
    """What the corrections of a job return together."""

    weights: Tensor | None
    """[B, T], or [B, 1] for weights of whole sequences; None if no correction gives weights."""
    keep_bt: Tensor
    metrics: dict[str, Tensor]


def _apply(
    corrections: Sequence[tuple[str, Mapping[str, Any]]], train_bt: Tensor, rollout_bt: Tensor, mask_bt: Tensor
) -> _Applied:
    """Calls each correction on the same tokens. Raises InvalidJob."""
    inputs = {"train_logprobs_bt": train_bt, "rollout_logprobs_bt": rollout_bt, "mask_bt": mask_bt}
    weighing: list[tuple[str, Tensor]] = []
    keep_bt, metrics = mask_bt, dict[str, Tensor]()
    for name, options in corrections:
        given, kept_bt, reported = call_algorithm(AlgorithmKind.CORRECTION, name, inputs, options)
        keep_bt = keep_bt & kept_bt
        if given is not None:
            weighing.append((name, given))
        for key, values in reported.items():  # two bounds on the same statistic reject what either rejects
            both = key in metrics and values.dtype == metrics[key].dtype == torch.bool
            metrics[key] = metrics[key] | values if both else values
    if len(weighing) > 1:
        what = " and ".join(repr(name) for name, _ in weighing)
        raise InvalidJob(f"The corrections {what} both give weights.", "Keep one of them; others may only reject.")
    if len(weighing) < len(corrections):
        is_cut_bt = mask_bt & ~keep_bt
        metrics["rollout_rs_masked_fraction"] = is_cut_bt
        metrics["rollout_rs_seq_masked_fraction"] = is_cut_bt.any(dim=-1)
    return _Applied(weighing[0][1] if weighing else None, keep_bt, metrics)


def _mean(weights: Tensor, mask_bt: Tensor) -> Tensor:
    """The mean over tokens of weights [B, T], or over sequences of weights [B, 1]; 1 if it is about 0."""
    weights, totals = weights.expand(mask_bt.shape[0], -1), BatchTotals.of(mask_bt)
    mean = _reduced(Rule.SUM, weights[:, 0] if weights.shape[1] == 1 else weights, mask_bt, totals)
    return torch.where(mean > SMALLEST_MEAN, mean, 1)


def _reduced(rule: Rule, values: Tensor, mask_bt: Tensor, totals: BatchTotals) -> Tensor:
    """The contribution of a metric of tokens, [B, T], or of sequences, [B], to the batch's mean or extreme."""
    if values.dim() == 1:
        counts, count = mask_bt.any(dim=-1), totals.sequences
    else:
        counts, count, values = mask_bt, totals.tokens, values.expand_as(mask_bt)
    match rule:
        case Rule.MAXIMUM:
            return values.masked_fill(~counts, -torch.inf).amax()
        case Rule.MINIMUM:
            return values.masked_fill(~counts, torch.inf).amin()
        case Rule.SUM:
            return values.masked_fill(~counts, 0).sum() / max(count, 1)

"""Corrections of the mismatch between the engine's log-probabilities and the trainer's. Each correction is one file.

A correction returns `(weights_bt, keep_bt, metrics_bt)`: bounded importance weights π_train/π_rollout (None means that
all are 1), the tokens that stay in the loss, and metrics by name. A metric of each token, [B, T], is averaged over the
tokens, a metric of each sequence, [B], over the sequences. Weights never carry a gradient.
"""

from typing import Any

import torch
from torch import Tensor

from millrace.rl.aggregation import BatchTotals
from millrace.rl.metrics.combining import Rule, rule_of
from millrace.rl.metrics.mismatch import PREFIX, mismatch_metrics, weight_metrics
from millrace.rl.registry.catalogue import AlgorithmKind
from millrace.rl.registry.functions import call_algorithm


@torch.no_grad()
def correct(
    name: str,
    *,
    train_logprobs_bt: Tensor,
    rollout_logprobs_bt: Tensor,
    mask_bt: Tensor,
    totals: BatchTotals | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Applies the correction `name`. Returns (weights_bt, keep_bt, metrics).

    train_logprobs_bt, rollout_logprobs_bt: [B, T]; log-probabilities of the same tokens under the same version of the
        weights, by the trainer and by the engine.
    mask_bt: [B, T], true on tokens that count.
    totals: the counts of the whole batch, where the tensors are a part of it. The metrics are then this part's
        contributions to the batch's metrics and combine with `combining.combined`.

    weights_bt: [B, T] in the log-probabilities' dtype, 0 where the mask is false; `policy_loss` takes them.
    keep_bt: bool [B, T], the mask of the loss from here on. Tokens that are not kept leave the loss and the count of
        tokens in its totals. Whether sequences that are rejected whole still count is the caller's choice: in verl and
        NeMo-RL they do.
    metrics: scalars named `rollout_corr/*`.

    Raises InvalidJob for an unknown name or option.
    """
    mask_bt = mask_bt.bool()
    totals = totals or BatchTotals.of(mask_bt)
    train_bt = train_logprobs_bt.masked_fill(~mask_bt, 0)
    rollout_bt = rollout_logprobs_bt.masked_fill(~mask_bt, 0)
    inputs = {"train_logprobs_bt": train_bt, "rollout_logprobs_bt": rollout_bt, "mask_bt": mask_bt}
    weights_bt, keep_bt, reported = call_algorithm(AlgorithmKind.CORRECTION, name, inputs, options)
    keep_bt = keep_bt & mask_bt
    metrics = mismatch_metrics(train_bt, rollout_bt, mask_bt, totals)
    if weights_bt is None:
        weights_bt = torch.ones_like(train_bt)
        is_cut_bt = mask_bt & ~keep_bt
        cut = {"rollout_rs_masked_fraction": is_cut_bt, "rollout_rs_seq_masked_fraction": is_cut_bt.any(dim=-1)}
        reported = {**reported, **cut}
    else:
        weights_bt = weights_bt.expand_as(train_bt)
        metrics |= weight_metrics(weights_bt, mask_bt, totals)
    for key, values in reported.items():
        metrics[PREFIX + key] = _reduced(rule_of(PREFIX + key), values.to(train_bt.dtype), mask_bt, totals)
    return weights_bt.masked_fill(~mask_bt, 0), keep_bt, metrics


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

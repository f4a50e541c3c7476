"""Corrections of the mismatch between the engine's log-probabilities and the trainer's. Each correction is one file.

A correction returns `(weights_bt, keep_bt, metrics_bt)`: bounded importance weights π_train/π_rollout (None means that
all are 1), the tokens that stay in the loss, and the metrics of each token by name. Weights never carry a gradient.
"""

from typing import Any

import torch
from torch import Tensor

from millrace.rl.aggregation import BatchTotals, aggregate
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
    keep_bt: bool [B, T]. Tokens that are not kept leave the loss *and* its denominators: the caller has to use
        `keep_bt` as the mask of the loss and to count the loss's totals from it.
    metrics: scalars named `rollout_corr/*`.

    Raises InvalidJob for an unknown name or option.
    """
    mask_bt = mask_bt.bool()
    totals = totals or BatchTotals.of(mask_bt)
    train_bt = train_logprobs_bt.masked_fill(~mask_bt, 0)
    rollout_bt = rollout_logprobs_bt.masked_fill(~mask_bt, 0)
    inputs = {"train_logprobs_bt": train_bt, "rollout_logprobs_bt": rollout_bt, "mask_bt": mask_bt}
    weights_bt, keep_bt, metrics_bt = call_algorithm(AlgorithmKind.CORRECTION, name, inputs, options)
    keep_bt = keep_bt & mask_bt
    metrics = mismatch_metrics(train_bt, rollout_bt, mask_bt, totals)
    if weights_bt is None:
        weights_bt = torch.ones_like(train_bt)
        is_cut_bt = mask_bt & ~keep_bt
        is_cut_b1 = is_cut_bt.any(dim=-1, keepdim=True)
        metrics_bt = {**metrics_bt, "rollout_rs_masked_fraction": is_cut_bt}
        cut_share = is_cut_b1.sum() / max(totals.sequences, 1)
        metrics[f"{PREFIX}rollout_rs_seq_masked_fraction"] = cut_share.to(train_bt.dtype)
    else:
        weights_bt = weights_bt.expand_as(train_bt)
        metrics |= weight_metrics(weights_bt, mask_bt, totals)
    for key, metric_bt in metrics_bt.items():
        spread_bt = metric_bt.to(train_bt.dtype).expand_as(train_bt)
        metrics[PREFIX + key] = aggregate("token-mean", spread_bt, mask_bt, totals=totals)
    return weights_bt.masked_fill(~mask_bt, 0), keep_bt, metrics

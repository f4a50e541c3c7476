"""Corrections of the mismatch between the engine's log-probabilities and the trainer's: one file a correction.

A correction returns `(weights_bt, keep_bt, shares_bt)`: bounded importance weights π_train/π_rollout (None: all 1), the
tokens that stay in the loss, and by name what to report a token. Weights never carry a gradient.
"""

from typing import Any

import torch
from torch import Tensor

from millrace.rl.aggregation import BatchTotals, aggregate
from millrace.rl.metrics.mismatch import PREFIX, mismatch_metrics, weight_metrics
from millrace.rl.registry.catalogue import Kind
from millrace.rl.registry.functions import call


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
    """Weights [B, T] in the log-probabilities' dtype, 0 where the mask is false; tokens to keep, bool; metrics.

    train_logprobs_bt, rollout_logprobs_bt: [B, T]; of the same tokens under the same version, by trainer and engine.
    mask_bt: [B, T], true on tokens that count.
    totals: the counts of the whole batch, where this is a part of it: the metrics then are this part's share of the
        batch's and combine as `metrics.combined` does.

    The weights go to `policy_loss` as `weights_bt`. Tokens that are not kept leave the loss *and* its denominators: use
    `keep_bt` as the mask from here on, and count the totals of the loss anew. Metrics are named `rollout_corr/*`.
    Raises InvalidJob for an unknown name or option.
    """
    mask_bt = mask_bt.bool()
    totals = totals or BatchTotals.of(mask_bt)
    train_bt = train_logprobs_bt.masked_fill(~mask_bt, 0)
    rollout_bt = rollout_logprobs_bt.masked_fill(~mask_bt, 0)
    inputs = {"train_logprobs_bt": train_bt, "rollout_logprobs_bt": rollout_bt, "mask_bt": mask_bt}
    weights_bt, keep_bt, shares_bt = call(Kind.CORRECTION, name, inputs, options)
    keep_bt = keep_bt & mask_bt
    metrics = mismatch_metrics(train_bt, rollout_bt, mask_bt, totals)
    if weights_bt is None:
        weights_bt = torch.ones_like(train_bt)
        is_cut_bt = mask_bt & ~keep_bt
        is_cut_b1 = is_cut_bt.any(dim=-1, keepdim=True)
        shares_bt = {**shares_bt, "rollout_rs_masked_fraction": is_cut_bt}
        cut_share = is_cut_b1.sum() / max(totals.sequences, 1)
        metrics[f"{PREFIX}rollout_rs_seq_masked_fraction"] = cut_share.to(train_bt.dtype)
    else:
        weights_bt = weights_bt.expand_as(train_bt)
        metrics |= weight_metrics(weights_bt, mask_bt, totals)
    for key, share_bt in shares_bt.items():
        spread_bt = share_bt.to(train_bt.dtype).expand_as(train_bt)
        metrics[PREFIX + key] = aggregate("token-mean", spread_bt, mask_bt, totals=totals)
    return weights_bt.masked_fill(~mask_bt, 0), keep_bt, metrics

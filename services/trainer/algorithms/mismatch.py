"""Metrics of how far the engine's policy is from the trainer's, under verl's names (`rollout_corr/*`).

w = π_train/π_rollout is the ratio of a token. Means are contributions to the batch's means, see `combining`, which
also computes `rollout_is_std` and `rollout_is_eff_sample_size` from the means here.
"""

import torch
from torch import Tensor

from millrace.rl.formulas.ratios import clamped, sequence_mean
from services.trainer.algorithms.aggregation import BatchTotals, aggregate

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

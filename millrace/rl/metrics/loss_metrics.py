"""Metrics of the importance ratio, which every policy loss reports."""

import torch
from torch import Tensor

from services.trainer.algorithms.aggregation import BatchTotals, aggregate
from services.trainer.algorithms.combining import HISTOGRAM
from millrace.rl.metrics.histogram import histogram


def ratio_metrics(log_ratio_bt: Tensor, mask_bt: Tensor, totals: BatchTotals) -> dict[str, Tensor]:
    """Contributions to the metrics of the ratio π/π_old, from its logarithm, [B, T].

    KL(π_old‖π) as estimated by k1 and k3; mean, extremes and histogram of the ratio.
    """
    ratio_bt = log_ratio_bt.exp()
    return {
        "approx_kl": aggregate("token-mean", -log_ratio_bt, mask_bt, totals=totals),
        "approx_kl_k3": aggregate("token-mean", torch.expm1(log_ratio_bt) - log_ratio_bt, mask_bt, totals=totals),
        "ratio_mean": aggregate("token-mean", ratio_bt, mask_bt, totals=totals),
        "ratio_max": torch.where(mask_bt, ratio_bt, -torch.inf).amax(),
        "ratio_min": torch.where(mask_bt, ratio_bt, torch.inf).amin(),
        HISTOGRAM: histogram(log_ratio_bt, mask_bt),
    }

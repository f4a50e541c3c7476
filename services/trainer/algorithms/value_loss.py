"""The critic's loss, clipped as in implementations of PPO."""

import torch
from torch import Tensor

from services.trainer.algorithms.aggregation import BatchTotals, aggregate


def value_loss(
    *,
    values_bt: Tensor,
    old_values_bt: Tensor,
    returns_bt: Tensor,
    mask_bt: Tensor,
    clip: float | None = 0.5,
    aggregation: str = "token-mean",
    totals: BatchTotals | None = None,
    horizon: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns this micro-batch's contribution to the value loss, a scalar to minimise, and to its metrics, detached.

    The loss of a token is 0.5·max((V − R)², (clip(V, V_old ± clip) − R)²), or 0.5·(V − R)² where `clip` is None. All
    tensors are [B, T]. `values_bt` carries the gradient; the advantages were computed from `old_values_bt`. For
    aggregation, totals and horizon see `aggregation.aggregate`.
    """
    mask_bt = mask_bt.bool()
    totals = totals or BatchTotals.of(mask_bt)
    values_bt = values_bt.masked_fill(~mask_bt, 0)
    old_values_bt = old_values_bt.detach().masked_fill(~mask_bt, 0)
    returns_bt = returns_bt.detach().masked_fill(~mask_bt, 0)
    squares_bt = (values_bt - returns_bt).square()
    is_clipped_bt = torch.zeros_like(mask_bt)
    if clip is not None:
        nearby_bt = torch.minimum(torch.maximum(values_bt, old_values_bt - clip), old_values_bt + clip)
        clipped_bt = (nearby_bt - returns_bt).square()
        is_clipped_bt = clipped_bt > squares_bt
        squares_bt = torch.maximum(squares_bt, clipped_bt)
    loss = 0.5 * aggregate(aggregation, squares_bt, mask_bt, totals=totals, horizon=horizon)
    metrics_bt = {
        "value_clip_fraction": is_clipped_bt.to(values_bt.dtype),
        "value_mean": values_bt,
        "return_mean": returns_bt,
        "value_square_error": (values_bt - returns_bt).square(),
    }
    metrics = {
        name: aggregate("token-mean", metric_bt.detach(), mask_bt, totals=totals)
        for name, metric_bt in metrics_bt.items()
    }
    return loss, {**metrics, "value_loss": loss.detach()}

"""The critic's loss, clipped as PPO's implementations do."""

import torch
from torch import Tensor

from millrace.rl.aggregation import BatchTotals, aggregate


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
    """This micro-batch's share of the value loss, a scalar to minimise, and of its metrics, detached.

    0.5·max((V − R)², (clip(V, V_old ± clip) − R)²) a token, [B, T]; `clip` none: 0.5·(V − R)². `values_bt` carries the
    gradient, `old_values_bt` are those that the advantages were computed with. aggregation, totals and horizon as in
    `aggregation.aggregate`.
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

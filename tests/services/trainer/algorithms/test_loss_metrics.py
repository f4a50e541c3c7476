"""Metrics of micro-batches combine to the batch's."""

import pytest
import torch

from services.trainer.algorithms.aggregation import EXTREMES, BatchTotals, combined, summarised
from services.trainer.algorithms.corrections import mismatch_metrics, weight_metrics
from services.trainer.algorithms.losses import ratio_metrics


def test_micro_batches_combine_to_the_batch():
    torch.manual_seed(0)
    log_ratio_bt = 0.1 * torch.randn(40, 50, dtype=torch.float64)
    mask_bt = torch.rand(40, 50) < 0.7
    totals = BatchTotals.of(mask_bt)
    parts = [ratio_metrics(log_ratio_bt[i : i + 7], mask_bt[i : i + 7], totals) for i in range(0, 40, 7)]
    numbers = summarised(combined(parts))
    ratios = log_ratio_bt[mask_bt].exp()
    assert numbers["ratio_mean"] == pytest.approx(ratios.mean().item())
    assert numbers["ratio_max"] == pytest.approx(ratios.max().item())
    assert numbers["ratio_min"] == pytest.approx(ratios.min().item())
    assert numbers["approx_kl"] == pytest.approx(-ratios.log().mean().item())
    assert numbers["approx_kl_k3"] == pytest.approx((ratios - 1 - ratios.log()).mean().item())
    for name, share in (("ratio_p01", 0.01), ("ratio_p50", 0.5), ("ratio_p99", 0.99)):
        assert numbers[name] == pytest.approx(ratios.quantile(share).item(), rel=6e-3)


def test_a_ratio_of_one_is_read_as_one():
    numbers = summarised(ratio_metrics(torch.zeros(1, 3), torch.ones(1, 3).bool(), BatchTotals(3, 1)))
    assert numbers["ratio_p01"] == numbers["ratio_p50"] == numbers["ratio_p99"] == pytest.approx(1.0, abs=1e-9)


def test_every_extreme_combines_as_one():
    ones_bt, totals = torch.ones(2, 3), BatchTotals(6, 2)
    names = ratio_metrics(ones_bt, ones_bt.bool(), totals) | mismatch_metrics(ones_bt, ones_bt, ones_bt.bool())
    names |= weight_metrics(ones_bt, ones_bt.bool(), totals)
    assert {name for name in names if name.endswith(("_max", "_min"))} == set(EXTREMES)


def test_a_users_metric_is_a_mean_whatever_its_name_ends_in():
    """Its contributions are parts of a mean, which the name must not turn into an extreme or a standard deviation."""
    parts = [{"ours_max": torch.tensor(0.25), "ours_mean_square": torch.tensor(0.5)} for _ in range(2)]
    assert summarised(combined(parts)) == {"ours_max": 0.5, "ours_mean_square": 1.0}

"""Metrics of micro-batches combine to the batch's."""

import pytest
import torch

from millrace.rl.aggregation import BatchTotals
from millrace.rl.metrics.loss_metrics import combined, ratio_metrics, summarised


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

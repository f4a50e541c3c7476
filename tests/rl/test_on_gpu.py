"""Everything gives on a GPU what it gives on the CPU, and stays there."""

import pytest
import torch

from services.trainer.algorithms.aggregation import combined, summarised
from services.trainer.algorithms.losses import selected_tokens, value_loss
from services.trainer.algorithms.tokens import pack, unpack
from tests.rl import test_advantages as advantages
from tests.rl import test_corrections as corrections
from tests.rl import test_policy_losses as losses
from tests.rl.batches import make_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


def assert_same(on_gpu: torch.Tensor, expected: torch.Tensor) -> None:
    assert on_gpu.is_cuda and on_gpu.dtype == expected.dtype
    loose = {"rtol": 2e-4, "atol": 2e-5} if expected.dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(on_gpu.cpu(), expected, **loose)


@DTYPES
@pytest.mark.parametrize("case", advantages.CASES, ids=str)
def test_advantages(case, dtype):
    batch = make_batch(1).to(dtype)
    results = advantages.computed(case, batch.on("cuda"))
    for result_bt, expected_bt in zip(results, advantages.computed(case, batch), strict=True):
        assert_same(result_bt, expected_bt)


@DTYPES
@pytest.mark.parametrize("case", losses.CASES, ids=str)
def test_policy_losses(case, dtype):
    batch = make_batch(2).to(dtype)
    results = {}
    for device in ("cpu", "cuda"):
        here = batch.on(device)
        logprobs_bt = here.logprobs_bt.clone().requires_grad_()
        selected_bt = selected_tokens(
            case.name,
            logprobs_bt=here.old_logprobs_bt,
            advantages_bt=here.advantages_bt,
            mask_bt=here.mask_bt,
            **case.options,
        )
        extra = {} if selected_bt is None else {"selected_bt": selected_bt}
        loss, metrics = losses.computed(case, here, logprobs_bt, **extra)
        loss.backward()
        results[device] = loss.detach(), logprobs_bt.grad, summarised(combined([metrics]))
    for got, want in zip(results["cuda"][:2], results["cpu"][:2], strict=True):
        assert_same(got, want)
    assert results["cuda"][2] == pytest.approx(
        results["cpu"][2], rel=2e-2 if dtype == torch.float32 else 1e-9, abs=1e-6
    )


@DTYPES
@pytest.mark.parametrize("case", corrections.CASES, ids=str)
def test_corrections(case, dtype):
    batch = make_batch(3).to(dtype)
    weights_bt, keep_bt, metrics = corrections.computed(case, batch.on("cuda"))
    expected_weights_bt, expected_keep_bt, expected_metrics = corrections.computed(case, batch)
    assert_same(weights_bt, expected_weights_bt)
    assert keep_bt.cpu().equal(expected_keep_bt)
    assert summarised(metrics) == pytest.approx(summarised(expected_metrics), rel=1e-3, abs=1e-6)


def test_value_loss_and_segments():
    batch = make_batch(4)
    results = []
    for device in ("cuda", "cpu"):
        here = batch.on(device)
        loss, _ = value_loss(
            values_bt=here.values_bt,
            old_values_bt=here.values_bt + here.advantages_bt,
            returns_bt=here.token_rewards_bt,
            mask_bt=here.mask_bt,
        )
        results += [loss, unpack(pack(here.values_bt, [8, 3, 0, 1, 8, 8, 8, 8, 8, 2]), [54])]
    assert_same(results[0], results[2])
    assert results[1].is_cuda
    torch.testing.assert_close(results[1].cpu(), results[3], equal_nan=True)

"""The critic's loss: by hand, against finite differences, exact over micro-batches."""

import math

import pytest
import torch

from services.trainer.algorithms.aggregation import BatchTotals
from services.trainer.algorithms.losses import value_loss
from tests.rl.batches import make_batch


def arguments(seed: int = 0) -> dict:
    batch = make_batch(seed)
    return {
        "values_bt": batch.values_bt,
        "old_values_bt": batch.values_bt + 0.5 * batch.advantages_bt,
        "returns_bt": batch.token_rewards_bt,
        "mask_bt": batch.mask_bt,
    }


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "expected", "clipped"),
    [
        (1.0, 1.0, 3.0, 0.5, 0.5 * 4.0, 0),
        (2.0, 1.0, 3.0, 0.5, 0.5 * 1.5**2, 1),  # moved towards the return by more than the clip: held back
        (0.0, 2.0, -1.0, 0.5, 0.5 * 2.5**2, 1),
        (0.0, 1.0, 3.0, 0.5, 0.5 * 9.0, 0),  # moved away: the worse of the two counts
        (2.0, 1.0, 3.0, None, 0.5, 0),
    ],
)
def test_by_hand(value, old, target, clip, expected, clipped):
    loss, metrics = value_loss(
        values_bt=torch.tensor([[value, math.nan]]),
        old_values_bt=torch.tensor([[old, math.nan]]),
        returns_bt=torch.tensor([[target, math.nan]]),
        mask_bt=torch.tensor([[1, 0]]),
        clip=clip,
    )
    assert loss.item() == pytest.approx(expected)
    assert metrics["value_clip_fraction"].item() == clipped
    assert metrics["value_square_error"].item() == pytest.approx((value - target) ** 2)


@pytest.mark.parametrize("clip", [0.3, None])
def test_gradients_against_finite_differences(clip):
    given = arguments()
    mask_bt = given["mask_bt"]
    values = given.pop("values_bt")[mask_bt].requires_grad_()

    def loss(values: torch.Tensor) -> torch.Tensor:
        values_bt = torch.full(mask_bt.shape, math.nan, dtype=torch.float64).masked_scatter(mask_bt, values)
        return value_loss(values_bt=values_bt, **given, clip=clip)[0]

    assert torch.autograd.gradcheck(loss, values)


def test_micro_batches_add_up():
    given = arguments(1)
    loss, metrics = value_loss(**given, clip=0.3)
    totals = BatchTotals.of(given["mask_bt"])
    parts = [
        value_loss(**{name: value[rows] for name, value in given.items()}, clip=0.3, totals=totals)
        for rows in ([0, 9], [1, 2, 3], [4, 5, 6, 7, 8])
    ]
    assert sum(part[0].item() for part in parts) == pytest.approx(loss.item())
    for name, value in metrics.items():
        assert sum(part[1][name].item() for part in parts) == pytest.approx(value.item())

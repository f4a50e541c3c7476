"""Numbers that are none stop the step and name the trajectory."""

import math

import pytest
import torch

from millrace.errors import NonFinite
from services.trainer.algorithms.tokens import check_finite

MASK_BT = torch.tensor([[1, 1, 0], [1, 1, 1]])


def test_finite_values_pass_whatever_stands_outside_the_mask():
    check_finite("rewards", torch.tensor([[1.0, 2.0, math.nan], [0.0, 0.0, 0.0]]), MASK_BT)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_trajectory_and_the_token_are_named(bad):
    values_bt = torch.tensor([[1.0, 2.0, math.nan], [0.0, bad, bad]])
    with pytest.raises(NonFinite, match=rf"advantages: {bad} at token 1 of sequence 1 \(2 such values in 1 of 2"):
        check_finite("advantages", values_bt, MASK_BT)
    with pytest.raises(NonFinite, match="trajectory 0-17/3"):
        check_finite("advantages", values_bt, MASK_BT, labels=["0-17/2", "0-17/3"])

"""The first values of adapters."""

import math

import pytest
import torch

from services.trainer.backends.lora import first_a


@pytest.mark.parametrize(
    ("init", "spread"), [("kaiming", math.sqrt(1 / 3 / 512)), ("gaussian", 1 / 64), ("xavier", math.sqrt(2 / 576))]
)
def test_first_values_of_a_matrix_a_have_the_spread_of_their_formula(init: str, spread: float) -> None:
    drawn = first_a("layers.0.q_proj.lora_A.weight", (64, 512), init, seed=0)
    assert float(drawn.std()) == pytest.approx(spread, rel=0.02) and abs(float(drawn.mean())) < 0.02 * spread
    assert torch.equal(drawn, first_a("layers.0.q_proj.lora_A.weight", (64, 512), init, seed=0))
    assert not torch.equal(drawn, first_a("layers.0.k_proj.lora_A.weight", (64, 512), init, seed=0))

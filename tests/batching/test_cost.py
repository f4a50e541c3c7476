"""Costs, by hand."""

import pytest

from millrace.batching.cost import SequenceCost


def test_linear_and_quadratic_parts():
    cost = SequenceCost(2.0, 0.5)
    assert cost.of(10) == 70
    assert cost.total([10, 2]) == 70 + 6


def test_equal_parts_are_a_cost_too():
    assert SequenceCost(1.0, 1.0).of(3) == 12


def test_of_a_model():
    cost = SequenceCost.of_model(matmul_parameters=1000, layers=2, heads=4, head_dim=8)
    assert cost.of(3) == 6 * 1000 * 3 + 6 * 9 * 2 * 4 * 8


@pytest.mark.parametrize("parts", [(0.0, 0.0), (-1.0, 2.0), (1.0, -0.1)])
def test_costs_that_order_nothing_are_refused(parts):
    with pytest.raises(ValueError, match="no positive cost"):
        SequenceCost(*parts)

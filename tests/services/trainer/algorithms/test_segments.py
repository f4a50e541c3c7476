"""Packed and padded forms are each other's inverse."""

import pytest
import torch

from services.trainer.algorithms.tokens import pack, unpack


def test_unpack_by_hand_and_back():
    values_p = torch.arange(1.0, 7.0)
    values_bt = unpack(values_p, [3, 1, 2])
    assert values_bt.tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]
    assert pack(values_bt, [3, 1, 2]).equal(values_p)


def test_gradients_flow_through():
    values_p = torch.randn(6, requires_grad=True)
    weights = torch.tensor([[1.0, 2, 3], [4, 99, 99], [5, 6, 99]])
    (unpack(values_p, [3, 1, 2]) * weights).sum().backward()
    assert values_p.grad.tolist() == [1, 2, 3, 4, 5, 6]


def test_lengths_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="add up to 5 but there are 6"):
        unpack(torch.zeros(6), [3, 2])

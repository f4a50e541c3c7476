"""Groups whose rewards are equal, by hand."""

import pytest
import torch

from millrace.drops import Drop, DropReason, all_equal, without_signal
from millrace.rl.formulas.groups import Groups


@pytest.mark.parametrize(
    ("rewards", "detail"),
    [
        ([1.0, 1.0, 1.0], "all 3 rewards are 1"),
        ([0.0, 0.0], "all 2 rewards are 0"),
        ([0.1 + 0.2, 0.3], "all 2 rewards are 0.3"),
        ([0.5], "all 1 rewards are 0.5"),
        ([], "no sample was scored"),
    ],
)
def test_groups_without_signal_are_dropped_with_the_reason(rewards, detail):
    assert without_signal(rewards) == Drop(DropReason.NO_SIGNAL, detail)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6, 1e12])
def test_one_rule_decides_what_is_equal(size):
    """That of the filter is that of a step's metric, of its warning, and of the advantages."""
    parts = [[0.1 * size, 0.2 * size, 0.7 * size], [0.7 * size, 0.2 * size, 0.1 * size], [0.3 * size, 0.7 * size]]
    sums = [sum(each) for each in parts]
    for rewards, alike in ((sums, True), ([*sums, size * (1 + 1e-3)], size <= 1e-6)):
        tensor = torch.tensor(rewards, dtype=torch.float64)
        groups = Groups.of(torch.zeros(len(rewards)), torch.ones(len(rewards), 1))
        assert all_equal(rewards) == (without_signal(rewards) is not None) == alike
        assert bool(groups.are_equal(tensor).all()) == bool((groups.centred(tensor, "zero") == 0).all()) == alike


def test_one_of_several_rewards_is_a_signal():
    assert without_signal([1.0, 1.0], [0.0, 1.0], [1.0, 0.0]) is None
    assert without_signal([1.0, 1.0], [0.5, 0.5]) == Drop(DropReason.NO_SIGNAL, "all 2 rewards are 1")


def test_groups_with_signal_are_kept():
    assert without_signal([0.0, 1.0, 0.0]) is None
    assert without_signal([0.2, 0.2001]) is None

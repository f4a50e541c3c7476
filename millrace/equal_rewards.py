"""Which rewards are equal, and which groups are therefore not worth a step (DAPO, arXiv 2503.14476)."""

from collections.abc import Sequence
from typing import Any

from millrace.drops import Drop, DropReason

TOLERANCE = 1e-9
"""Difference of rewards, absolute and relative to them, up to which they are equal. The same rewards that are summed in
another order, or in other parts, differ by rounding: in float64 by far less than this."""


def equal(lowest: Any, highest: Any) -> Any:
    """Whether rewards from `lowest` to `highest` are all equal: of numbers, or of each element of two tensors. Nothing
    else decides this."""
    return highest - lowest <= TOLERANCE * (1 + abs(lowest) + abs(highest))


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group are all equal."""
    return bool(equal(min(rewards), max(rewards)))


def without_signal(rewards: Sequence[float]) -> Drop | None:
    """Dynamic sampling: a group whose rewards are all equal is dropped, as every advantage in it is 0. None where the
    group is kept."""
    if not rewards:
        return Drop(DropReason.NO_SIGNAL, "no sample was scored")
    if not all_equal(rewards):
        return None
    return Drop(DropReason.NO_SIGNAL, f"all {len(rewards)} rewards are {max(rewards):g}")

"""Which groups are worth a step, and DAPO's punishment of answers that are about too long (arXiv 2503.14476)."""

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


def overlong_penalty(length: int, *, limit: int, buffer: int, penalty: float = 1.0) -> float:
    """The summand to the reward of an answer of `length` tokens: 0 up to limit − buffer, then falling linearly.

    It is ((limit − buffer) − length) / buffer · penalty (equation 13 of DAPO, arXiv 2503.14476), but at least −penalty.
    With `buffer` 0 there is no penalty up to `limit`. Raises ValueError for a buffer outside 0 to `limit`.
    """
    if buffer < 0 or buffer > limit:
        raise ValueError(f"buffer = {buffer}: it has to be from 0 to the limit, {limit} tokens.")
    beyond = length - (limit - buffer)
    if beyond <= 0:
        return 0.0
    return -penalty * min(beyond / buffer, 1.0) if buffer else -penalty

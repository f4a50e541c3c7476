"""Which groups are worth a step, and DAPO's punishment of answers that are about too long (arXiv 2503.14476)."""

from collections.abc import Sequence

from millrace.drops import Drop, DropReason


def without_signal(rewards: Sequence[float], *, tolerance: float = 1e-9) -> Drop | None:
    """Dynamic sampling: a group whose rewards are all equal is dropped, as every advantage in it is 0. None where the
    group is kept.

    `tolerance` is the largest difference of rewards that counts as none.
    """
    if not rewards:
        return Drop(DropReason.NO_SIGNAL, "no sample was scored")
    lowest, highest = min(rewards), max(rewards)
    if highest - lowest > tolerance:
        return None
    return Drop(DropReason.NO_SIGNAL, f"all {len(rewards)} rewards are {highest:g}")


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

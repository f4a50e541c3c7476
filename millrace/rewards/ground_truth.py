"""A row's ground truth: one, or a list of which each is accepted."""

from typing import Any


def truths_of(ground_truth: Any) -> list[Any]:
    """A list as it is, anything else alone. Raises ValueError where there is none."""
    truths = list(ground_truth) if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not truths or any(truth is None for truth in truths):
        raise ValueError(f"the row has no ground truth to compare with: {ground_truth!r}")
    return truths

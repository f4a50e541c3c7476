"""A row's ground truth: one value, or a list of values of which each is accepted."""

from typing import Any


def truths_of(ground_truth: Any) -> list[Any]:
    """All accepted ground truths. Raises ValueError if there is none."""
    truths = list(ground_truth) if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not truths or any(truth is None for truth in truths):
        raise ValueError(f"the row has no ground truth to compare with: {ground_truth!r}")
    return truths

"""Exact match with the ground truth, ignoring white space around both."""

import re
from typing import Any

from millrace.rewards.option_values import compiled, flag, truths_of


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    ignore_case: bool = False,
    extract: str | None = None,
) -> float | dict[str, Any]:
    """1 if the answer equals the ground truth (or one of a list of ground truths), otherwise 0.

    `extract` is a regular expression: its last match in the answer, or the match's first group if it has one, is
    compared instead of the whole answer; without a match the score is 0. Raises ValueError for a row without ground
    truth.
    """
    truths = [_form(str(truth), ignore_case) for truth in truths_of(ground_truth)]
    if extract is None:
        return float(_form(solution_str, ignore_case) in truths)
    answer = _last_match(extract, solution_str)
    return {"score": float(answer is not None and _form(answer, ignore_case) in truths), "answer": answer}


def check_options(ignore_case: bool = False, extract: str | None = None) -> None:
    """Raises ValueError for a wrong value of an option."""
    flag("ignore_case", ignore_case)
    if extract is not None:
        compiled("extract", extract)


def _last_match(pattern: str, text: str) -> str | None:
    matches = list(re.finditer(pattern, text))
    if not matches:
        return None
    return matches[-1].group(1 if matches[-1].re.groups else 0)


def _form(text: str, ignore_case: bool) -> str:
    return text.strip().casefold() if ignore_case else text.strip()

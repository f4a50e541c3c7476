"""Mathematical equality by math-verify: 0.5, 1/2 and \\frac{1}{2} are the same answer.

math-verify's own timeouts use signals and are switched off, because a scoring process that takes too long is killed
from outside.
"""

import logging
import re
from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from millrace.rewards.option_values import truths_of

# It warns on every start that its timeouts are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)

ANYWHERE = (LatexExtractionConfig(), ExprExtractionConfig())
BOXED_ONLY = (LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False),)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    require_boxed: bool = False,
) -> dict[str, Any]:
    """1 if the answer equals the ground truth (or one of a list of ground truths), otherwise 0.

    The ground truth is a number, plain (`1/2`) or as LaTeX, with or without dollar signs or \\boxed. The answer is
    searched in \\boxed, then after words like "final answer is", then anywhere; with `require_boxed` only in \\boxed.
    Raises ValueError for a ground truth that cannot be read as mathematics, since no answer could be right.
    """
    gold = [value for truth in truths_of(ground_truth) for value in _read_truth(str(truth))]
    if require_boxed and "\\boxed" not in solution_str:
        return {"score": 0.0, "answer": None}
    targets = BOXED_ONLY if require_boxed else ANYWHERE
    answer = parse(solution_str, targets, parsing_timeout=None)
    right = bool(answer) and verify(gold, answer, timeout_seconds=None)
    return {"score": float(right), "answer": str(answer[-1]) if answer else None}


@lru_cache(maxsize=256)
def _read_truth(truth: str) -> Sequence[Any]:
    """The ground truth as mathematics. It is cached, because all answers of a group have the same ground truth."""
    text = _without_exponent(truth.strip().strip("$"))
    values: Sequence[Any] = parse(text if "\\boxed" in text else f"\\boxed{{{text}}}", ANYWHERE, parsing_timeout=None)
    if not text or not values:
        raise ValueError(f"the ground truth {truth!r} cannot be read as a number or an expression")
    return values


def _without_exponent(text: str) -> str:
    """A number without exponent: 1e-07, as JSON writes small numbers, would be read as 1 · e − 7."""
    if not re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d{1,3}", text):
        return text
    return format(Decimal(text), "f")

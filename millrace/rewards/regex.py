"""Whether a regular expression matches the answer."""

import re
from typing import Any

from millrace.rewards.option_values import compiled, flag, truths_of


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    pattern: str | None = None,
    whole: bool = False,
    ignore_case: bool = False,
) -> float:
    """1 if `pattern` matches somewhere in the answer, otherwise 0. Without `pattern` the ground truth is the pattern,
    or a list of patterns of which one has to match. `whole`: the whole answer has to match, without white space around.

    Raises ValueError for a row whose ground truth is needed as a pattern and is not one.
    """
    flags = re.IGNORECASE if ignore_case else 0
    patterns = [pattern] if pattern is not None else truths_of(ground_truth)
    expressions = [compiled("the ground truth" if pattern is None else "pattern", p, flags) for p in patterns]
    answer = solution_str.strip()
    return float(any(e.fullmatch(answer) if whole else e.search(answer) for e in expressions))


def check_options(pattern: str | None = None, whole: bool = False, ignore_case: bool = False) -> None:
    """Raises ValueError for a wrong value of an option."""
    flag("whole", whole)
    flag("ignore_case", ignore_case)
    if pattern is not None:
        compiled("pattern", pattern)

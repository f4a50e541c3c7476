"""Whether the answer has the required structure, whatever its content."""

import re
from typing import Any

from millrace.rewards.option_values import compiled

THINK_THEN_ANSWER = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>"


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    pattern: str = THINK_THEN_ANSWER,
) -> float:
    """1 if the whole answer, without white space around it, matches `pattern` (`.` matches line ends too), otherwise 0.

    The default requires one `<think>` section, one `<answer>` section after it, and nothing else.
    """
    return float(compiled("pattern", pattern, re.DOTALL).fullmatch(solution_str.strip()) is not None)


def check_options(pattern: str = THINK_THEN_ANSWER) -> None:
    """Raises ValueError for a wrong value of an option."""
    compiled("pattern", pattern, re.DOTALL)

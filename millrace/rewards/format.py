"""Whether the answer has the structure that was asked for; its content is not looked at."""

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
    """1 where the stripped answer matches `pattern` from end to end (`.` matches line ends too), else 0.

    The default asks for one `<think>` part and one `<answer>` part after it, and nothing else.
    """
    return float(compiled("pattern", pattern, re.DOTALL).fullmatch(solution_str.strip()) is not None)


def check_options(pattern: str = THINK_THEN_ANSWER) -> None:
    compiled("pattern", pattern, re.DOTALL)

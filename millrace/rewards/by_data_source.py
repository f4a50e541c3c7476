"""Scores an answer by the rule of its data source, as verl does if a job names no reward function."""

import re
import string
from collections.abc import Mapping
from typing import Any

from millrace.rewards import math
from millrace.rewards.data_sources import Rule, rule_of, why_none
from millrace.rewards.option_values import truths_of
from millrace.rewards.programs import scorer as programs

END = 300
"""Characters at the end of an answer in which a final answer is looked for."""
CASES = 10
"""Test cases of a program that count, the first ones."""
FORMAT_SHARE = 0.1
"""Part of the score of a geometry problem that its form earns."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float | dict[str, Any]:
    """The rule of the row's `data_source`, with the names of verl's `default_compute_score`. Expressions are compared
    by math-verify. `openai/gsm8k`: the number after the last `####`. `lighteval/MATH`,
    `DigitalLearningGmbH/MATH-lighteval`, `HuggingFaceH4/MATH-500`: the expression in `\\boxed`. `math`, `math_dapo`,
    `math_dapo_reasoning` and `aime*`: what follows the last `Answer:`, 1 or -1. `hiyouga/geometry3k`: 0.9 for the
    expression in `\\boxed` and 0.1 for the form `<think>…</think>…\\boxed{…}`. `searchR1_*`: the text in the last
    `<answer>`, without case, articles and punctuation. `numina_*`: as `math`. `codecontests`, `apps`, `codeforces`,
    `taco`: as `code`, with the first 10 test cases.

    Raises ValueError for another data source and for a row without a usable ground truth.
    """
    match rule_of(data_source):
        case Rule.GSM8K:
            return _gsm8k(solution_str, ground_truth)
        case Rule.BOXED:
            return math.compute_score(data_source, solution_str, ground_truth, require_boxed=True)
        case Rule.DAPO:
            return _dapo(solution_str, ground_truth)
        case Rule.GEOMETRY:
            return _geometry(solution_str, ground_truth)
        case Rule.SEARCH:
            return _search(solution_str, ground_truth)
        case Rule.MATH:
            return math.compute_score(data_source, solution_str, ground_truth)
        case Rule.PROGRAM:
            return programs.compute_score(data_source, solution_str, ground_truth, max_cases=CASES)
        case None:
            raise ValueError(why_none(data_source))


def _gsm8k(answer: str, ground_truth: Any) -> dict[str, Any]:
    found = re.findall(r"#### *\$?(-?[0-9.,]+)", answer[-END:])
    number = _number(found[-1]) if found else None
    return {"score": float(number in [_number(str(truth)) for truth in truths_of(ground_truth)]), "answer": number}


def _number(text: str) -> str:
    return text.strip().lstrip("$").replace(",", "").rstrip(".")


def _dapo(answer: str, ground_truth: Any) -> dict[str, Any]:
    found = re.findall(r"answer\s*:\s*([^\n]+)", answer[-END:], flags=re.IGNORECASE)
    given = found[-1].strip().strip("$").strip() if found else None
    right = given is not None and _equal(given, ground_truth)
    truths_of(ground_truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": given}


def _geometry(answer: str, ground_truth: Any) -> dict[str, Any]:
    right = float(math.compute_score("", answer, ground_truth, require_boxed=True)["score"])
    formed = float(re.fullmatch(r"<think>.*</think>.*\\boxed\{.*\}.*", answer.strip(), re.DOTALL) is not None)
    return {"score": (1 - FORMAT_SHARE) * right + FORMAT_SHARE * formed, "acc": bool(right), "format": formed}


def _equal(given: str, ground_truth: Any) -> bool:
    boxed = given if "\\boxed" in given else f"\\boxed{{{given}}}"
    return bool(math.compute_score("", boxed, ground_truth, require_boxed=True)["score"])


def _search(answer: str, ground_truth: Any) -> dict[str, Any]:
    targets = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    accepted = {_words(str(truth)) for truth in truths_of(targets)}
    found = re.findall(r"<answer>(.*?)</answer>", answer, flags=re.DOTALL)
    given = found[-1].strip() if found else None
    return {"score": float(given is not None and _words(given) in accepted), "answer": given}


def _words(text: str) -> str:
    bare = "".join(" " if c in string.whitespace else c for c in text.lower() if c not in string.punctuation)
    return " ".join(word for word in bare.split() if word not in ("a", "an", "the"))

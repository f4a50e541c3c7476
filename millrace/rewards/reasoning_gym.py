"""The tasks of reasoning-gym and their scorers. A row has its task, options and entry in `extra_info`."""

import json
import re
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

with warnings.catch_warnings():
    # A library that it imports compares with `is` to a literal, which Python reports when it compiles the file.
    warnings.simplefilter("ignore", SyntaxWarning)
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS, create_dataset

KEY = "reasoning_gym"
"""The key of `extra_info` under which a row keeps {task, options, entry}."""

TASKS = DATASETS

UNREADABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, SyntaxError, TypeError, ValueError)
"""What some scorers raise for an answer that they cannot parse. The answer is wrong then, not the scorer."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    tag: str | None = "answer",
) -> dict[str, Any]:
    """The task's own score of the answer, from 0 to 1; some tasks give partial scores.

    The answer is the content of the last `<tag>` in the text; without one the score is 0. With `tag: null` the answer
    is the whole text. If the task's scorer cannot read the answer, the score is 0 and `unreadable` in the details says
    why. Raises ValueError for a row that does not come from reasoning-gym.
    """
    origin = (extra_info or {}).get(KEY)
    if not isinstance(origin, Mapping) or not {"task", "entry"} <= origin.keys():
        raise ValueError(f"the row's extra_info has no {KEY!r} with task and entry; it is not from this source")
    answer = solution_str.strip() if tag is None else _tagged(solution_str, tag)
    if answer is None:
        return {"score": 0.0, "answer": None}
    data_set = _scoring_data_set(origin["task"], json.dumps(origin.get("options") or {}, sort_keys=True))
    entry = unpack(origin["entry"])
    try:
        return {"score": float(data_set.score_answer(answer, entry)), "answer": answer}
    except UNREADABLE as error:
        return {"score": 0.0, "answer": answer, "unreadable": f"{type(error).__name__}: {error}"}


def create(task: str, options: Mapping[str, Any]) -> ProceduralDataset:
    """The data set of a task. Raises ValueError, TypeError or AssertionError like reasoning-gym for wrong options."""
    options = dict(options)
    if task == "composite":
        options["datasets"] = [DatasetSpec(**{"config": {}, **part}) for part in options.get("datasets") or []]
    return create_dataset(task, **options)


@lru_cache(maxsize=64)
def _scoring_data_set(task: str, options: str) -> ProceduralDataset:
    return create(task, json.loads(options))


def _tagged(text: str, tag: str) -> str | None:
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, flags=re.DOTALL)
    return found[-1].strip() if found else None


TUPLE, SET, PAIRS = "__tuple__", "__set__", "__pairs__"


def pack(value: Any) -> Any:
    """`value` in JSON's types; `unpack` restores it. Raises TypeError for a value that JSON cannot represent."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, list):
        return [pack(v) for v in value]
    if isinstance(value, tuple):
        return {TUPLE: [pack(v) for v in value]}
    if isinstance(value, set | frozenset):
        return {SET: [pack(v) for v in sorted(value, key=repr)]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key not in (TUPLE, SET, PAIRS) for key in value):
            return {str(k): pack(v) for k, v in value.items()}
        return {PAIRS: [[pack(k), pack(v)] for k, v in value.items()]}
    if hasattr(value, "tolist"):
        return pack(value.tolist())
    raise TypeError(f"a {type(value).__name__} has no JSON form: {value!r}")


def unpack(value: Any) -> Any:
    """The inverse of `pack`. JSON that was never packed is returned unchanged."""
    if isinstance(value, list):
        return [unpack(v) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key == TUPLE:
            return tuple(unpack(v) for v in inner)
        if key == SET:
            return {unpack(v) for v in inner}
        if key == PAIRS:
            return {unpack(k): unpack(v) for k, v in inner}
    return {k: unpack(v) for k, v in value.items()}

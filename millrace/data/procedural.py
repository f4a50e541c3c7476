"""Procedural tasks: generated rows, which depend only on the task, its options and the number of the row."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from millrace.data.columns.messages import Message
from millrace.data.prompt_source import PromptSource
from millrace.data.row import PromptRow
from millrace.errors import BadRow, refused
from millrace.software import how_to_install
from millrace.validation.limits import LARGEST_SEED
from millrace.validation.names import choose, closest

PREFIX = "reasoning_gym:"
INSTRUCTION = (
    "Work the problem out step by step. Then give the final answer, and nothing else, between <answer> and </answer>. "
    "Where the problem shows an example, write the answer in the form of the example's."
)
"""The scorer looks for the answer in that tag."""
MOST_ROWS = 10_000_000
LARGEST_OPTION = 1_000_000


class ReasoningGym(PromptSource):
    """`reasoning_gym:<task>`. The options `size` (number of rows, default 1000), `seed` (default 0) and `system_prompt`
    (null: none) belong to the source, all others to the task. Rows are scored by the reward `reasoning_gym`."""

    def __init__(self, name: str, options: Mapping[str, Any], field: str) -> None:
        if not name.startswith(PREFIX):
            fix = "write reasoning_gym:<task>, for example reasoning_gym:spell_backward."
            raise refused(f"{field}.procedural", name, "there is no such kind of source", fix)
        try:
            from millrace.rewards import reasoning_gym
        except ImportError as error:
            fix = f"install it: {how_to_install('scoring')}."
            raise refused(f"{field}.procedural", name, f"reasoning-gym is not installed: {error}", fix) from error
        self._task = name.removeprefix(PREFIX)
        if self._task not in reasoning_gym.TASKS:
            near = closest(self._task, reasoning_gym.TASKS)
            fix = f"did you mean `{PREFIX}{near}`?" if near is not None else "see reasoning-gym's list of tasks."
            raise refused(f"{field}.procedural", name, "reasoning-gym has no such task", fix)
        known = dict(options)
        size, seed = known.pop("size", 1000), known.pop("seed", 0)
        _check_numbers(known, f"{field}.procedural_options")
        self._system_prompt = known.pop("system_prompt", INSTRUCTION)
        self._options = known
        self._size = _whole(size, 1, MOST_ROWS, f"{field}.procedural_options.size")
        seed = _whole(seed, 0, LARGEST_SEED, f"{field}.procedural_options.seed")
        task_options = [each.name for each in dataclasses.fields(reasoning_gym.TASKS[self._task][1])]
        for option in known:
            if option not in task_options:
                reason, fix = f"the task {self._task} has no such option", choose(option, task_options)
                raise refused(f"{field}.procedural_options.{option}", known[option], reason, fix)
        try:
            self._data_set = reasoning_gym.create(self._task, {**known, "size": self._size, "seed": seed})
        except (TypeError, ValueError, AssertionError, KeyError) as error:
            reason = f"the task {self._task} does not accept them: {error}"
            raise refused(
                f"{field}.procedural_options", dict(options), reason, "correct or remove that option."
            ) from error

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> PromptRow:
        if not 0 <= index < self._size:
            raise IndexError(f"row {index} of {self._size}")
        from millrace.rewards.reasoning_gym import KEY, pack

        entry = self._data_set[index]
        try:
            packed = pack(entry)
        except TypeError as error:
            fix = "choose other options, or another task."
            raise BadRow(f"{PREFIX}{self._task} row {index}: cannot be sent: {error}.", fix) from error
        messages: list[Message] = [{"role": "user", "content": entry["question"]}]
        if self._system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        return PromptRow(
            index=index,
            data_source=f"{PREFIX}{self._task}",
            prompt=messages,
            ground_truth=pack(entry["answer"]),
            extra_info={"index": index, KEY: {"task": self._task, "options": self._options, "entry": packed}},
        )


def _whole(value: Any, least: int, most: int, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise refused(field, value, f"is not a whole number from {least} to {most}", "give such a number.")
    return value


def _check_numbers(value: Any, field: str) -> None:
    """The numbers among a task's options are small enough for a row to be made at once: they are lengths, counts and
    sizes of what it shows. Raises InvalidJob."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _check_numbers(inner, f"{field}.{name}")
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            _check_numbers(inner, f"{field}.{place}")
    elif isinstance(value, int | float) and abs(value) > LARGEST_OPTION:
        reason = f"is larger than {LARGEST_OPTION}, and a row may take without end to make"
        raise refused(field, value, reason, "give a smaller number.")

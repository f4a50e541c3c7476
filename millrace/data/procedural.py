"""Procedural tasks: rows made on the spot, the same for the same task, options and number."""

import difflib
from collections.abc import Mapping
from typing import Any

from millrace.data.row import Message, PromptRow
from millrace.data.source import Source
from millrace.errors import BadRow, refused
from millrace.extras import how_to_install

PREFIX = "reasoning_gym:"
INSTRUCTION = (
    "Work the problem out step by step. Then give the final answer, and nothing else, between <answer> and </answer>. "
    "Where the problem shows an example, write the answer in the form of the example's."
)
"""The scorer looks for the answer in that tag."""


class ReasoningGym(Source):
    """`reasoning_gym:<task>`. Of the options, `size` (rows, 1000), `seed` (0) and `system_prompt` (null for none) are
    the source's, all others the task's. Rows are scored by the reward `reasoning_gym`."""

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
            close = difflib.get_close_matches(self._task, reasoning_gym.TASKS, n=1, cutoff=0.4)
            fix = f"did you mean reasoning_gym:{close[0]}?" if close else "see reasoning-gym's list of tasks."
            raise refused(f"{field}.procedural", name, "reasoning-gym has no such task", fix)
        known = dict(options)
        size, seed = known.pop("size", 1000), known.pop("seed", 0)
        self._system_prompt = known.pop("system_prompt", INSTRUCTION)
        self._options = known
        self._size = _whole(size, 1, f"{field}.procedural_options.size")
        seed = _whole(seed, 0, f"{field}.procedural_options.seed")
        try:
            self._data_set = reasoning_gym.create(self._task, {**known, "size": self._size, "seed": seed})
        except (TypeError, ValueError, AssertionError, KeyError) as error:
            reason = f"the task {self._task} does not take them: {error or type(error).__name__}"
            raise refused(f"{field}.procedural_options", dict(options), reason, "fix or remove that option.") from error

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> PromptRow:
        if not 0 <= index < self._size:
            raise IndexError(f"row {index} of {self._size}")
        from millrace.rewards.entry import pack
        from millrace.rewards.reasoning_gym import KEY

        entry = self._data_set[index]
        try:
            packed = pack(entry)
        except TypeError as error:
            fix = "choose other options, or another task."
            raise BadRow(f"{PREFIX}{self._task} row {index} cannot travel: {error}.", fix) from error
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


def _whole(value: Any, least: int, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise refused(field, value, f"it is a whole number, {least} or more", "give such a number.")
    return value

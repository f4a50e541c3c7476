"""The demo's tasks by name, and the shortest of them, `reverse`: `reverse badge` → `egdab`.

Words have 4 to 6 letters out of ten: there are 1.1 million of them.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from millrace.data.row import PromptRow
from millrace.demo.hunt import TreasureHunt
from millrace.demo.task import HELD_OUT, TRAIN, Task, Turn, write_task_data
from millrace.errors import InvalidJob
from millrace.validation.names import choose

LETTERS = "abcdefghij"
LENGTHS = (4, 5, 6)
DATA_SOURCE = "demo/reverse"


class Reverse(Task):
    """Words are turned round. Wrong conversations copy them."""

    def cases(self, rng: random.Random) -> Iterator[str]:
        while True:
            yield "".join(rng.choices(LETTERS, k=rng.choice(LENGTHS)))

    def row(self, index: int, case: str) -> PromptRow:
        return PromptRow(
            index=index,
            data_source=DATA_SOURCE,
            prompt=[{"role": "user", "content": question(case)}],
            ground_truth=answer(case),
            ability="letters",
            extra_info={"index": index, "letters": len(case)},
        )

    def conversation(self, case: str, rng: random.Random, *, right: bool) -> list[Turn]:
        return [("user", question(case)), ("assistant", answer(case) if right else case)]


def question(word: str) -> str:
    return f"reverse {word}"


def answer(word: str) -> str:
    return word[::-1]


def write_data(folder: Path, seed: int, train: int = TRAIN, held_out: int = HELD_OUT) -> tuple[Path, Path]:
    """The data of this task: see `write_task_data`."""
    return write_task_data(Reverse(), folder, seed, train, held_out)


TASKS: dict[str, Task] = {"reverse": Reverse(), "hunt": TreasureHunt()}


def task_named(name: str) -> Task:
    """Raises InvalidJob."""
    if name not in TASKS:
        raise InvalidJob(f"--task: there is no task {name!r}.", choose(name, list(TASKS)))
    return TASKS[name]

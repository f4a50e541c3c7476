"""The task `reverse`: `reverse badge` → `egdab`. Words of 4 to 6 letters out of ten: there are 1.1 million of them."""

import random
from collections.abc import Iterator
from pathlib import Path

from millrace.data.row import PromptRow
from millrace.demo.task import HELD_OUT, TRAIN, Task, Turn, write_task_data

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

"""A task of the demo: its rows, and the conversations that its model is warmed with."""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from millrace.data.row import PromptRow, write_rows

TRAIN, HELD_OUT = 2048, 256
"""Number of rows."""
Turn = tuple[str, str]
"""Role and text of a message."""


class Task(ABC):
    """A task. A case is the text that a row is made of: a word to turn round, or the places of a hunt."""

    changes: ClassVar[Path | None] = None
    """What its job has other than `job.yaml`; None: nothing."""
    tokens: ClassVar[Sequence[str]] = ()
    """Tokens of its chat format besides those of ChatML."""

    @abstractmethod
    def cases(self, rng: random.Random) -> Iterator[str]:
        """Random cases without end."""

    @abstractmethod
    def row(self, index: int, case: str) -> PromptRow:
        """The row of a case."""

    @abstractmethod
    def conversation(self, case: str, rng: random.Random, *, right: bool) -> list[Turn]:
        """A conversation about a case, to warm the model with: one that earns the reward, or one that does not."""


def write_task_data(
    task: Task, folder: Path, seed: int, train: int = TRAIN, held_out: int = HELD_OUT
) -> tuple[Path, Path]:
    """`train.parquet` and `held_out.parquet` in `folder`, in verl's columns; no case is in both."""
    chosen: dict[str, None] = {}
    for case in task.cases(random.Random(seed)):
        chosen.setdefault(case)
        if len(chosen) == train + held_out:
            break
    rows = [task.row(index, case) for index, case in enumerate(chosen)]
    return (
        write_rows(folder / "train.parquet", rows[:train]),
        write_rows(folder / "held_out.parquet", rows[train:]),
    )

"""The task: `reverse badge` → `egdab`. Words of 4 to 6 letters out of ten, so there are 1.1 million of them."""

import random
from collections.abc import Iterator
from pathlib import Path

from millrace.data.row import PromptRow
from millrace.data.write import write_rows

LETTERS = "abcdefghij"
LENGTHS = (4, 5, 6)
TRAIN, HELD_OUT = 2048, 256
"""Number of rows."""
DATA_SOURCE = "demo/reverse"


def words(rng: random.Random) -> Iterator[str]:
    """Random words without end."""
    while True:
        yield "".join(rng.choices(LETTERS, k=rng.choice(LENGTHS)))


def question(word: str) -> str:
    return f"reverse {word}"


def answer(word: str) -> str:
    return word[::-1]


def row(index: int, word: str) -> PromptRow:
    return PromptRow(
        index=index,
        data_source=DATA_SOURCE,
        prompt=[{"role": "user", "content": question(word)}],
        ground_truth=answer(word),
        ability="letters",
        extra_info={"index": index, "letters": len(word)},
    )


def write_data(folder: Path, seed: int, train: int = TRAIN, held_out: int = HELD_OUT) -> tuple[Path, Path]:
    """`train.parquet` and `held_out.parquet` in `folder`, in verl's columns; no word is in both."""
    chosen: dict[str, None] = {}
    for word in words(random.Random(seed)):
        chosen.setdefault(word)
        if len(chosen) == train + held_out:
            break
    rows = [row(index, word) for index, word in enumerate(chosen)]
    return (
        write_rows(folder / "train.parquet", rows[:train]),
        write_rows(folder / "held_out.parquet", rows[train:]),
    )

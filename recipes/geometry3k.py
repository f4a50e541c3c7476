"""Geometry3K (arXiv 2105.04165) as `hiyouga/geometry3k` publishes it: `images`, `problem` with `<image>` where each of
them stands, and `answer`, an expression in LaTeX."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from millrace.data import PromptRow, open_source
from millrace.data.columns.layout import Reading
from millrace.data.columns.messages import text_of
from millrace.errors import BadRow

TRAIN = "hf://datasets/hiyouga/geometry3k/data/train-00000-of-00001.parquet"
TEST = "hf://datasets/hiyouga/geometry3k/data/test-00000-of-00001.parquet"
DATA_SOURCE = "hiyouga/geometry3k"
INSTRUCTION = "Reason step by step between <think> and </think>. Then put your final answer within \\boxed{}."
"""The reward of this data source reads both."""
READING = Reading({"prompt": "problem", "ground_truth": "answer", "images": "images"}, "chat", most_images=8)


def rows(path: str) -> Iterator[PromptRow]:
    """The rows of a file, Parquet or JSON lines, in verl's columns, with the files of their images. Raises InvalidJob
    for a file without these columns, and BadRow for the first row that cannot be used."""
    for row in open_source([path], reading=READING, field="source").scan():
        if isinstance(row, BadRow):
            raise row
        yield _row(row)


def _row(row: PromptRow) -> PromptRow:
    place = f"row {row.index} of {DATA_SOURCE}"
    truth, (message,) = row.ground_truth, list[Any](row.prompt)
    if not isinstance(truth, str) or not truth.strip():
        raise BadRow(f"{place}, column answer: has no text.", "correct the row, or leave it out.")
    if not row.images:
        raise BadRow(f"{place}: has no image.", "give the file of the data set as published.")
    shown = [*message["content"], {"type": "text", "text": f"\n\n{INSTRUCTION}"}]
    extra = {"index": row.index, "question": text_of(message), "answer": truth}
    return replace(
        row,
        data_source=DATA_SOURCE,
        prompt=[{"role": "user", "content": shown}],
        ground_truth=truth.strip(),
        ability="math",
        extra_info=extra,
    )

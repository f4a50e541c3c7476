"""GSM8K (arXiv 2110.14168): `question`, and `answer`, worked out in words and ending in `#### 72`."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from millrace.data import PromptRow
from millrace.data.columns.messages import Message
from millrace.data.jsonl import JsonlRows
from millrace.data.prompt_files import PARQUET
from millrace.errors import BadRow, refused

TRAIN = "hf://datasets/openai/gsm8k/main/train-00000-of-00001.parquet"
TEST = "hf://datasets/openai/gsm8k/main/test-00000-of-00001.parquet"
DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = "Reason step by step, and put your final answer within \\boxed{}."
COLUMNS = ("question", "answer")
TRUTH = re.compile(r"####\s*(-?[\d,]*\.?\d+)")


def rows(path: str) -> Iterator[PromptRow]:
    """The rows of a file, Parquet or JSON lines, in verl's columns. Raises InvalidJob for a file that is not GSM8K's,
    and BadRow for the first row without a question or a number after `####`."""
    for index, (place, raw) in enumerate(_read(path)):
        yield _row(index, place, raw)


def _row(index: int, place: str, raw: Any) -> PromptRow:
    texts = [raw.get(column) if isinstance(raw, dict) else None for column in COLUMNS]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise BadRow(f"{place}: has no text in {' and '.join(COLUMNS)}.", "give the file of the data set as published.")
    question, answer = (str(text).strip() for text in texts)
    found = TRUTH.search(answer)
    if found is None:
        raise BadRow(f"{place}, column answer: has no number after ####.", "correct the row, or leave it out.")
    prompt: list[Message] = [{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}]
    truth = found[1].replace(",", "")
    extra = {"index": index, "question": question, "answer": answer}
    return PromptRow(index, DATA_SOURCE, prompt, ground_truth=truth, ability="math", extra_info=extra)


def _read(path: str) -> Iterable[tuple[str, Any]]:
    """Every row with its place in the file, for errors."""
    if not path.endswith(PARQUET):
        file = JsonlRows(path, "source")
        return ((file.place(row), file.raw(row)) for row in range(len(file)))
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise refused("source", path, f"is not a Parquet file: {error}", "download the file again.") from error
    if missing := [column for column in COLUMNS if column not in table.column_names]:
        fix = "give a file of the configuration main or socratic of openai/gsm8k."
        raise refused("source", path, f"has no column {', '.join(missing)}", fix)
    return ((f"{path} row {row}", raw) for row, raw in enumerate(table.select(COLUMNS).to_pylist()))

"""DAPO-Math-17k (arXiv 2503.14476) and, in the same columns, AIME 2024.

The published files are in verl's columns already, but hold every prompt many times: 17 thousand problems in 1.8
million rows. Each is kept once.
"""

from collections.abc import Iterator
from dataclasses import replace

from millrace.data import PromptRow, open_source
from millrace.data.columns.messages import text_of
from millrace.errors import BadRow

TRAIN = "hf://datasets/BytedTsinghua-SIA/DAPO-Math-17k/data/dapo-math-17k.parquet"
TEST = "hf://datasets/BytedTsinghua-SIA/AIME-2024/data/aime-2024.parquet"


def rows(path: str) -> Iterator[PromptRow]:
    """The problems of a file, Parquet or JSON lines, each once, in the order of their first rows. Problems whose rows
    have different answers are left out, because one of the answers is wrong. Raises InvalidJob for a file without
    verl's columns, and BadRow for the first row that cannot be used."""
    first: dict[str, PromptRow] = {}
    contradicted: set[str] = set()
    for row in open_source([path], field="source").scan():
        if isinstance(row, BadRow):
            raise row
        problem = _text(row)
        if _truth(first.setdefault(problem, row)) != _truth(row):
            contradicted.add(problem)
    kept = (row for problem, row in first.items() if problem not in contradicted)
    for index, row in enumerate(kept):
        extra = {"index": index, "source_index": str(row.extra_info.get("index", row.index))}
        yield replace(row, index=index, ground_truth=_truth(row), reward_style="rule", ability="math", extra_info=extra)


def _text(row: PromptRow) -> str:
    prompt = row.prompt
    return prompt if isinstance(prompt, str) else "\n".join(map(text_of, prompt)).strip()


def _truth(row: PromptRow) -> str:
    return str(row.ground_truth).strip()

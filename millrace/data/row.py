"""One row of the data: from the columns of a file to a `PromptRow` in plain Python types, and back to a file in verl's
columns."""

import gzip
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.data.columns.images import MARK, RowImages, data_url
from millrace.data.columns.layout import VERL_TRUTH, Layout, Reading
from millrace.data.columns.messages import Message, answer_of, is_conversation, read_messages, text_of
from millrace.data.columns.values import Values
from millrace.errors import BadRow
from millrace.spec.model import PromptFormat

QUESTION_CHARACTERS = 2_000


@dataclass(frozen=True)
class PromptRow:
    """One prompt, and what its answers are scored with."""

    index: int
    """Number of the row in its source, from 0."""
    data_source: str
    prompt: list[Message] | str
    """Messages for the chat template, or plain text."""
    ground_truth: Any = None
    """What the scorer compares an answer with, in JSON's types."""
    reward_style: str = "rule"
    ability: str = ""
    extra_info: dict[str, Any] = field(default_factory=dict)
    images: tuple[bytes, ...] = ()
    """Files of its images, in the order of their places in the prompt."""

    @property
    def question(self) -> str:
        """The last message of the user, at most QUESTION_CHARACTERS of it; empty if the prompt is plain text."""
        messages = [] if isinstance(self.prompt, str) else self.prompt
        asked = next((each for each in reversed(messages) if each["role"] == "user"), None)
        return "" if asked is None else text_of(asked)[:QUESTION_CHARACTERS]


def read_row(index: int, raw: Any, place: str, layout: Layout, reading: Reading | None = None) -> PromptRow:
    """The row that a file holds as `raw`, in the file's layout. `place` names file and row for errors. Raises BadRow
    for the first column with a wrong value."""
    try:
        return _read(index, Values(raw, place), layout, reading or Reading())
    except RecursionError as error:
        raise BadRow(f"{place}: is nested too deeply.", "make it flatter.") from error


def _read(index: int, row: Values, layout: Layout, reading: Reading) -> PromptRow:
    images = RowImages(row, layout.images, reading.most_images)
    prompt, answer = _prompt(row, layout, images, reading.prompt_format)
    images.check_all_used()
    truth = None if answer is None else answer_of(answer)
    if layout.ground_truth is not None:
        truth = _ground_truth(row, layout.ground_truth)
    style = row.optional(layout.reward_style)
    if style is not None and not isinstance(style, str):
        raise row.wrong(layout.reward_style or "", style, "is not text", "write rule or model.")
    source = row.text(layout.data_source) if layout.data_source is not None else layout.default_source
    return PromptRow(
        index=index,
        data_source=source,
        prompt=_formatted(prompt, reading.prompt_format),
        ground_truth=truth,
        reward_style=style or "rule",
        ability="" if row.optional(layout.ability) is None else row.text(layout.ability or ""),
        extra_info=_extra_info(row, layout),
        images=tuple(images.files),
    )


def _prompt(
    row: Values, layout: Layout, images: RowImages, prompt_format: PromptFormat
) -> tuple[list[Message] | str, Message | None]:
    """The prompt, and the last answer of the assistant if that is not part of it. Raises BadRow."""
    column, value = layout.prompt, row.required(layout.prompt)
    if isinstance(value, str):
        if not value:
            raise row.bad(column, "is empty", "write the prompt.")
        if prompt_format == "chat":
            return [{"role": "user", "content": images.split(value)}], None
        return value, None
    if not isinstance(value, list | tuple) or not value:
        fix = "write text, or a list of messages {role, content}."
        raise row.wrong(column, value, "is neither text nor a list of messages", fix)
    messages = read_messages(row, column, value, images)
    if not layout.whole_conversation or messages[-1]["role"] != "assistant":
        return messages, None
    if len(messages) == 1:
        raise row.bad(column, "has an answer and no prompt", "write what the assistant answers before it.")
    return messages[:-1], messages[-1]


def _ground_truth(row: Values, column: str) -> Any:
    value = row.given(column)
    if column != VERL_TRUTH and is_conversation(value):
        return answer_of(read_messages(row, column, value)[-1])
    return row.plain(column, value)


def _extra_info(row: Values, layout: Layout) -> dict[str, Any]:
    if layout.extra_info is None:
        return {name: row.plain(name, row.optional(name)) for name in layout.others}
    if row.optional(layout.extra_info) is None:
        return {}
    return dict(row.plain(layout.extra_info, row.mapping(layout.extra_info)))


def _formatted(prompt: list[Message] | str, prompt_format: PromptFormat) -> list[Message] | str:
    if prompt_format == "text" and not isinstance(prompt, str):
        return "\n\n".join(text_of(message) for message in prompt)
    return prompt


def json_texts(row: PromptRow) -> tuple[str, str, str]:
    """The prompt, the ground truth and the extra_info of a row as JSON, as they are sent to a replica. Raises BadRow
    for what cannot be sent."""
    try:
        texts = [json.dumps(value, ensure_ascii=False) for value in (row.prompt, row.ground_truth, row.extra_info)]
        for text in (row.data_source, *texts):
            text.encode()
    except UnicodeEncodeError as error:
        fix = r"write the whole character: \ud83d\ude42, not \ud83d alone."
        raise BadRow(f"row {row.index} of the data holds half a character: {error}.", fix) from error
    except RecursionError as error:
        raise BadRow(f"row {row.index} of the data is nested too deeply.", "make it flatter.") from error
    return texts[0], texts[1], texts[2]


def write_rows(path: str | Path, rows: Iterable[PromptRow]) -> Path:
    """Writes `rows` to `path` in the format of its ending: .parquet, .jsonl or .jsonl.gz. The file appears once it is
    complete. Returns `path`.

    Raises ValueError for another ending, for no rows, and for rows that do not fit into the columns of one Parquet
    file, such as ground truths of several types; JSON lines can hold those.
    """
    path = Path(path)
    given = list(rows)
    shown = any(row.images for row in given)  # Parquet has the columns of the first row
    columns = [_columns(row) | ({"images": list(row.images)} if shown else {}) for row in given]
    if not columns:
        raise ValueError(f"there are no rows to write to {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.name.endswith(".parquet"):
            _write_parquet(part, columns)
        elif path.name.endswith((".jsonl", ".jsonl.gz")):
            text = "".join(json.dumps(row, ensure_ascii=False, default=data_url) + "\n" for row in columns).encode()
            part.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
        else:
            raise ValueError(f"the name of {path} ends neither in .parquet nor in .jsonl or .jsonl.gz")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _columns(row: PromptRow) -> dict[str, Any]:
    return {
        "data_source": row.data_source,
        "prompt": _with_marks(row.prompt) if row.images else row.prompt,
        "ability": row.ability,
        "reward_model": {"style": row.reward_style, "ground_truth": row.ground_truth},
        # Parquet cannot store an object without fields.
        "extra_info": row.extra_info or {"index": row.index},
    }


def _with_marks(prompt: list[Message] | str) -> list[dict[str, Any]] | str:
    """The messages as text, with a mark in the place of each image."""
    if isinstance(prompt, str):
        return prompt
    return [{**message, "content": _marked(message["content"])} for message in prompt]


def _marked(content: str | list[dict[str, Any]] | None) -> str | None:
    if not isinstance(content, list):
        return content
    return "".join(part["text"] if part["type"] == "text" else MARK for part in content)


def _write_parquet(path: Path, columns: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pa.Table.from_pylist(columns)
    except pa.ArrowException as error:
        raise ValueError(f"the rows do not fit into one Parquet table: {error}; write .jsonl instead") from error
    pq.write_table(table, path)

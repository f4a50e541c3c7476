"""One row of the data: from verl's columns in a file to a `PromptRow` in plain Python types."""

import datetime
import decimal
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict, cast

from millrace.errors import BadRow, wrong_value
from millrace.validation.kinds import kind_of

COLUMNS = ("data_source", "prompt", "reward_model", "ability", "extra_info")
REQUIRED = ("data_source", "prompt", "reward_model")


class Message(TypedDict):
    """One message of a conversation."""

    role: str
    content: str
    name: NotRequired[str]


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


def read_row(index: int, raw: Any, place: str) -> PromptRow:
    """The row that a file holds as `raw`. `place` names file and row for errors. Raises BadRow for the first column
    with a wrong value."""
    try:
        return _read(index, _Columns(raw, place))
    except RecursionError as error:
        raise BadRow(f"{place}: is nested too deeply.", "make it flatter.") from error


def _read(index: int, row: "_Columns") -> PromptRow:
    reward_model = row.mapping("reward_model")
    if "ground_truth" not in reward_model:
        raise row.bad("reward_model.ground_truth", "is missing", "add it; null if the reward needs none.")
    style = reward_model.get("style")
    if style is not None and not isinstance(style, str):
        raise row.wrong("reward_model.style", style, "is not text", "write rule or model.")
    return PromptRow(
        index=index,
        data_source=row.text("data_source"),
        prompt=row.prompt(),
        ground_truth=row.plain("reward_model.ground_truth", reward_model["ground_truth"]),
        reward_style=style or "rule",
        ability=row.text("ability") if row.has("ability") else "",
        extra_info=row.plain("extra_info", row.mapping("extra_info")) if row.has("extra_info") else {},
    )


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


class _Columns:
    """The columns of one raw row. Every error names file, row and column."""

    def __init__(self, raw: Any, place: str) -> None:
        self._place = place
        if not isinstance(raw, Mapping):
            raise BadRow(f"{place}: is {kind_of(raw)}, not an object.", "write one object with verl's columns.")
        self._raw = raw

    def bad(self, column: str, reason: str, fix: str) -> BadRow:
        """The error for a column that has no value."""
        return BadRow(f"{self._place}, column {column}: {reason}.", fix)

    def wrong(self, column: str, value: Any, reason: str, fix: str) -> BadRow:
        """The error for a column with a wrong value."""
        return BadRow(wrong_value(f"{self._place}, column {column}", value, reason, fix).what, fix)

    def has(self, column: str) -> bool:
        """Whether the column has a value other than null."""
        return self._raw.get(column) is not None

    def text(self, column: str) -> str:
        """The text in a column. Raises BadRow."""
        value = self._required(column)
        if not isinstance(value, str):
            raise self.wrong(column, value, "is not text", "write text.")
        return value

    def mapping(self, column: str) -> Mapping[str, Any]:
        """The object in a column. Raises BadRow."""
        value = self._required(column)
        if not isinstance(value, Mapping):
            raise self.wrong(column, value, "is not an object", "write an object with named fields.")
        return value

    def prompt(self) -> list[Message] | str:
        """The prompt: messages, or plain text. Raises BadRow."""
        value = self._required("prompt")
        if isinstance(value, str):
            if not value:
                raise self.bad("prompt", "is empty", "write the prompt.")
            return value
        if not isinstance(value, list | tuple) or not value:
            fix = "write text, or a list of messages {role, content}."
            raise self.wrong("prompt", value, "is neither text nor a list of messages", fix)
        return [self._message(f"prompt[{place}]", message) for place, message in enumerate(value)]

    def plain(self, column: str, value: Any) -> Any:
        """`value` in JSON's types. Parquet also has times, decimals and bytes. Raises BadRow for bytes."""
        if value is None or isinstance(value, str | int | float):
            return value
        if isinstance(value, Mapping):
            return {str(k): self.plain(f"{column}.{k}", v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(f"{column}[{place}]", v) for place, v in enumerate(value)]
        if isinstance(value, datetime.date | datetime.time):
            return value.isoformat()
        if isinstance(value, decimal.Decimal):
            return str(value)
        raise self.wrong(column, value, f"is {kind_of(value)}, which JSON cannot hold", "store text or a number.")

    def _message(self, column: str, message: Any) -> Message:
        if not isinstance(message, Mapping):
            raise self.wrong(column, message, "is not a message", "write {role, content}.")
        for key in ("role", "content"):
            fix = "write {role, content}, both as text."
            if key not in message:
                raise self.bad(f"{column}.{key}", "is missing", fix)
            if not isinstance(message[key], str):
                raise self.wrong(f"{column}.{key}", message[key], "is not text", fix)
        # A Parquet column has all fields in all messages: fields that a message does not have are null.
        kept = {str(k): self.plain(f"{column}.{k}", v) for k, v in message.items() if v is not None}
        return cast(Message, kept)

    def _required(self, column: str) -> Any:
        value = self._raw.get(column)
        if value is None:
            raise self.bad(column, "is null" if column in self._raw else "is missing", "give it a value.")
        return value

"""One row of the data: from what a file holds, in verl's columns, to a `PromptRow` of plain Python."""

import datetime
import decimal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict, cast

from millrace.errors import BadRow

COLUMNS = ("data_source", "prompt", "reward_model", "ability", "extra_info")
REQUIRED = ("data_source", "prompt", "reward_model")


class Message(TypedDict):
    role: str
    content: str
    name: NotRequired[str]


@dataclass(frozen=True)
class PromptRow:
    index: int
    """Number of the row in the source, from 0."""
    data_source: str
    prompt: list[Message] | str
    """Messages for the chat template, or a text that is asked as it is."""
    ground_truth: Any = None
    """Whatever the scorer compares with, as JSON can say it."""
    reward_style: str = "rule"
    ability: str = ""
    extra_info: dict[str, Any] = field(default_factory=dict)


def read_row(index: int, raw: Any, place: str) -> PromptRow:
    """`place` names file and row for errors. Raises BadRow for the first column that is not what it has to be."""
    row = _Columns(raw, place)
    reward_model = row.mapping("reward_model")
    if "ground_truth" not in reward_model:
        raise row.bad("reward_model.ground_truth", "is missing", "add it; null where the reward needs none.")
    style = reward_model.get("style")
    if style is not None and not isinstance(style, str):
        raise row.bad("reward_model.style", f"is {_kind(style)}, not a text", "write rule or model.")
    return PromptRow(
        index=index,
        data_source=row.text("data_source"),
        prompt=row.prompt(),
        ground_truth=row.plain("reward_model.ground_truth", reward_model["ground_truth"]),
        reward_style=style or "rule",
        ability=row.text("ability") if row.has("ability") else "",
        extra_info=row.plain("extra_info", row.mapping("extra_info")) if row.has("extra_info") else {},
    )


class _Columns:
    """Reads the columns of one raw row; every complaint names file, row and column."""

    def __init__(self, raw: Any, place: str) -> None:
        self._place = place
        if not isinstance(raw, Mapping):
            raise BadRow(f"{place} is {_kind(raw)}, not an object.", "write one object with verl's columns.")
        self._raw = raw

    def bad(self, column: str, found: str, fix: str) -> BadRow:
        return BadRow(f"{self._place}, column {column}: {found}.", fix)

    def has(self, column: str) -> bool:
        return self._raw.get(column) is not None

    def text(self, column: str) -> str:
        value = self._required(column)
        if not isinstance(value, str):
            raise self.bad(column, f"is {_kind(value)}, not a text", "write a text.")
        return value

    def mapping(self, column: str) -> Mapping[str, Any]:
        value = self._required(column)
        if not isinstance(value, Mapping):
            raise self.bad(column, f"is {_kind(value)}, not an object", "write an object with named fields.")
        return value

    def prompt(self) -> list[Message] | str:
        value = self._required("prompt")
        if isinstance(value, str):
            if not value:
                raise self.bad("prompt", "is an empty text", "write what is asked.")
            return value
        if not isinstance(value, list | tuple) or not value:
            fix = "write a text, or a list of messages {role, content}."
            raise self.bad("prompt", f"is {_kind(value)}, neither a text nor messages", fix)
        return [self._message(f"prompt[{place}]", message) for place, message in enumerate(value)]

    def plain(self, column: str, value: Any) -> Any:
        """`value` in JSON's types. Parquet also has times, decimals and bytes."""
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
        raise self.bad(column, f"is {_kind(value)}, which JSON cannot hold", "store it as a text or a number.")

    def _message(self, column: str, message: Any) -> Message:
        if not isinstance(message, Mapping):
            raise self.bad(column, f"is {_kind(message)}, not a message", "write {role, content}.")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = f"is {_kind(message[key])}, not a text" if key in message else "is missing"
                raise self.bad(f"{column}.{key}", found, "write {role, content} with two texts.")
        # A Parquet column has all fields in all messages: those that a message does not have are null.
        kept = {str(k): self.plain(f"{column}.{k}", v) for k, v in message.items() if v is not None}
        return cast(Message, kept)

    def _required(self, column: str) -> Any:
        value = self._raw.get(column)
        if value is None:
            raise self.bad(column, "is null" if column in self._raw else "is missing", "give it a value.")
        return value


def _kind(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"

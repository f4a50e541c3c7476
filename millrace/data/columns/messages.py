"""Messages of a conversation, in the forms in which data sets hold them.

A content is text or a list of parts of text; it may be null in a message that calls tools. The arguments of such a call
are an object, or an object as JSON text, as OpenAI's API has them. Chat templates get text and objects.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict, cast

from millrace.data.columns.values import Values

TEXT_PARTS = ("text", "input_text", "output_text")


class Message(TypedDict):
    """One message of a conversation."""

    role: str
    content: str | None
    """None only beside `tool_calls`."""
    name: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]


def read_messages(row: Values, column: str, value: Sequence[Any]) -> list[Message]:
    """The messages in a column. Raises BadRow."""
    return [_message(row, f"{column}[{place}]", message) for place, message in enumerate(value)]


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages."""
    return (
        isinstance(value, list | tuple) and bool(value) and all(isinstance(m, Mapping) and "role" in m for m in value)
    )


def answer_of(message: Message) -> Any:
    """What a message of the assistant answers: its text, or the tools that it calls."""
    return message["content"] or message.get("tool_calls") or message["content"]


def _message(row: Values, column: str, message: Any) -> Message:
    fix = "write {role, content}, both as text."
    if not isinstance(message, Mapping):
        raise row.wrong(column, message, "is not a message", "write {role, content}.")
    if "role" not in message:
        raise row.bad(f"{column}.role", "is missing", fix)
    if not isinstance(message["role"], str):
        raise row.wrong(f"{column}.role", message["role"], "is not text", fix)
    # A Parquet column has all fields in all messages: fields that a message does not have are null.
    kept = {str(k): row.plain(f"{column}.{k}", v) for k, v in message.items() if v is not None}
    if calls := kept.pop("tool_calls", None):
        kept["tool_calls"] = _calls(row, f"{column}.tool_calls", calls)
    if "content" in kept:
        kept["content"] = _text(row, f"{column}.content", kept["content"])
    elif calls:
        kept["content"] = None
    elif "content" in message:
        raise row.wrong(f"{column}.content", None, "is not text", fix)
    else:
        raise row.bad(f"{column}.content", "is missing", fix)
    return cast(Message, kept)


def _text(row: Values, column: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise row.wrong(column, content, "is not text", "write text, or a list of parts {type: text, text}.")
    return "".join(_part(row, f"{column}[{place}]", part) for place, part in enumerate(content))


def _part(row: Values, column: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
        raise row.wrong(column, part, "is not a part of text", "write {type: text, text}: prompts are text only.")
    return str(part["text"])


def _calls(row: Values, column: str, calls: Any) -> list[dict[str, Any]]:
    """Calls of tools, with their arguments as objects."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise row.wrong(column, calls, "is not a list of calls", "write [{type: function, function: {...}}].")
    read = []
    for place, call in enumerate(_without_nulls(calls)):
        function = call.get("function", call)
        if isinstance(arguments := function.get("arguments"), str):
            try:
                parsed = json.loads(arguments)
            except (ValueError, RecursionError):
                parsed = None
            if not isinstance(parsed, dict):
                fix = "write an object, or an object as JSON text."
                raise row.wrong(f"{column}[{place}].function.arguments", arguments, "is not a JSON object", fix)
            changed = {**function, "arguments": parsed}
            call = {**call, "function": changed} if "function" in call else changed
        read.append(call)
    return read


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value

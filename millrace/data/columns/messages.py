"""Messages of a conversation, in the forms in which data sets hold them.

A content is text or a list of parts of text and images; it may be null in a message that calls tools. The arguments of
such a call are an object, or an object as JSON text, as OpenAI's API has them. Chat templates get text, parts of text
and images if there are images, and objects.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict, cast

from millrace.data.columns.images import KINDS, RowImages
from millrace.data.columns.values import Values

TEXT_PARTS = ("text", "input_text", "output_text")


class Message(TypedDict):
    """One message of a conversation."""

    role: str
    content: str | list[dict[str, Any]] | None
    """A list of parts if the message has images; None only beside `tool_calls`."""
    name: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]


def read_messages(row: Values, column: str, value: Sequence[Any], images: RowImages | None = None) -> list[Message]:
    """The messages in a column, whose images are added to `images`. Raises BadRow."""
    found = RowImages(row, None, None) if images is None else images
    return [_message(row, f"{column}[{place}]", message, found) for place, message in enumerate(value)]


def text_of(message: Message) -> str:
    """The text of a message, without its images."""
    content = message["content"]
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages."""
    return (
        isinstance(value, list | tuple) and bool(value) and all(isinstance(m, Mapping) and "role" in m for m in value)
    )


def answer_of(message: Message) -> Any:
    """What a message of the assistant answers: its text, or the tools that it calls."""
    return message["content"] or message.get("tool_calls") or message["content"]


def _message(row: Values, column: str, message: Any, images: RowImages) -> Message:
    fix = "write {role, content}, both as text."
    if not isinstance(message, Mapping):
        raise row.wrong(column, message, "is not a message", "write {role, content}.")
    if "role" not in message:
        raise row.bad(f"{column}.role", "is missing", fix)
    if not isinstance(message["role"], str):
        raise row.wrong(f"{column}.role", message["role"], "is not text", fix)
    # A Parquet column has all fields in all messages: fields that a message does not have are null.
    kept = {str(k): v if k == "content" else row.plain(f"{column}.{k}", v) for k, v in message.items() if v is not None}
    if calls := kept.pop("tool_calls", None):
        kept["tool_calls"] = _calls(row, f"{column}.tool_calls", calls)
    if "content" in kept:
        kept["content"] = _content(row, f"{column}.content", kept["content"], images)
    elif calls:
        kept["content"] = None
    elif "content" in message:
        raise row.wrong(f"{column}.content", None, "is not text", fix)
    else:
        raise row.bad(f"{column}.content", "is missing", fix)
    return cast(Message, kept)


def _content(row: Values, column: str, content: Any, images: RowImages) -> str | list[dict[str, Any]]:
    """Text, or a list of parts if there are images."""
    if isinstance(content, str):
        return images.split(content)
    if not isinstance(content, list | tuple):
        raise row.wrong(column, content, "is not text", "write text, or a list of parts {type: text, text}.")
    parts: list[dict[str, Any]] = []
    for place, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type") in KINDS:
            parts.append(images.part(f"{column}[{place}]", part))
            continue
        split = images.split(_part(row, f"{column}[{place}]", part))
        parts += [{"type": "text", "text": split}] if isinstance(split, str) else split
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(row: Values, column: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
        fix = "write {type: text, text}, or {type: image_url, image_url: {url}} in a job with data.images."
        raise row.bad(column, "is neither a part of text nor an image", fix)
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

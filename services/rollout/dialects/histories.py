"""Messages of OpenAI's chat format as the chat formats of models take them: content as text, arguments of calls as
objects."""

from collections.abc import Mapping, Sequence
from typing import Any

from millrace.errors import Mistake, wrong_value
from services.rollout.dialects.requests import Refused, read_json
from services.rollout.episode.chat import Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles of clients, and what they are in the chat formats of models."""
TEXT = ("text", "input_text", "output_text", "refusal")
"""Types of parts of a content that are text."""


def history(messages: Sequence[Mapping[str, Any]], field: str = "messages") -> list[Message]:
    """The messages of a client. Raises Refused."""
    return [_message(message, f"{field}.{number}") for number, message in enumerate(messages)]


def text_of(content: Any, field: str) -> str:
    """The text of a content: text, or a list of parts. Raises Refused for images, sound and files."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refused.of(wrong_value(field, content, "is neither text nor a list of parts", "send text."))
    return "".join(_part(part, f"{field}.{number}") for number, part in enumerate(content))


def _part(part: Any, field: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, str):
        return part
    if kind not in TEXT:
        raise Refused.of(wrong_value(f"{field}.type", kind, "is not text", "send parts of the type text."))
    text = part.get("text", part.get("refusal"))
    if not isinstance(text, str):
        raise Refused.of(wrong_value(f"{field}.text", text, "is not text", "send text."))
    return text


def _message(given: Mapping[str, Any], field: str) -> Message:
    role = given.get("role")
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise Refused.of(wrong_value(f"{field}.role", role, "there is no such role", f"name one of {known}."))
    message: Message = {"role": ROLES[role], "content": text_of(given.get("content"), f"{field}.content")}
    if role == "assistant":
        reasoning = given.get("reasoning_content") or given.get("reasoning")
        if isinstance(reasoning, str):
            message["reasoning_content"] = reasoning
        if calls := given.get("tool_calls"):
            message["tool_calls"] = _calls(calls, f"{field}.tool_calls")
    for name in ("tool_call_id", "name"):
        if isinstance(given.get(name), str):
            message[name] = given[name]
    return message


def _calls(given: Any, field: str) -> list[dict[str, Any]]:
    calls = []
    for number, call in enumerate(given if isinstance(given, list) else [None]):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            why = Mistake(f"{field}.{number}.function", "a call names a function", "send {name, arguments}.")
            raise Refused.of(why)
        named = {"name": function["name"], "arguments": arguments_of(function.get("arguments"))}
        calls.append({"id": str(call.get("id", "")), "type": "function", "function": named})
    return calls


def arguments_of(given: Any) -> Any:
    """The arguments of a call as an object, which most chat templates expect; the text itself if it is not JSON."""
    if not isinstance(given, str):
        return given or {}
    try:
        return read_json(given) if given.strip() else {}
    except (ValueError, RecursionError):
        return given

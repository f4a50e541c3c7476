"""Anthropic's messages: requests to what they ask of the policy, turns to answers."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, Field

from millrace.errors import wrong_value
from millrace.validation import limits
from services.rollout.dialects.chat_completions import calls_allowed, stops
from services.rollout.dialects.histories import arguments_of, text_of
from services.rollout.dialects.requests import Refused, event
from services.rollout.dialects.turns import SampledTurn, Speaker, TurnRequest
from services.rollout.engine import StopReason
from services.rollout.episode.chat import Message

ROLES = ("user", "assistant", "system")
STOP_REASONS = {
    StopReason.END_OF_TURN: "end_turn",
    StopReason.STOP_STRING: "stop_sequence",
    StopReason.LENGTH: "max_tokens",
}


class MessagesRequest(BaseModel):
    """What is read of a request. temperature, top_p, top_k and the budget of `thinking` are the job's."""

    model: str = ""
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=100_000)
    system: Any = None
    max_tokens: int | None = Field(None, ge=1, le=limits.MOST_TOKENS)
    tools: list[dict[str, Any]] | None = Field(None, max_length=1024)
    tool_choice: dict[str, Any] | None = None
    stop_sequences: Any = None
    stream: bool | None = None

    def turn_request(self) -> TurnRequest:
        """What the request asks of the policy. Raises Refused."""
        system = text_of(self.system, "system")
        history: list[Message] = [{"role": "system", "content": system}] if system else []
        for number, message in enumerate(self.messages):
            history += _messages(message, f"messages.{number}")
        return TurnRequest(
            messages=history,
            tools=[_tool(tool, f"tools.{number}") for number, tool in enumerate(self.tools or ())],
            max_tokens=self.max_tokens,
            stop=stops(self.stop_sequences),
            calls=calls_allowed((self.tool_choice or {}).get("type")),
        )


def _tool(tool: Mapping[str, Any], field: str) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), Mapping):
        reason = "has no name and input_schema: tools of the server are not offered here"
        raise Refused.of(wrong_value(field, tool, reason, "give {name, description, input_schema}."))
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _messages(given: Mapping[str, Any], field: str) -> list[Message]:
    """A message of Anthropic as those of a chat format: each result of a tool is a message of its own."""
    role, content = given.get("role"), given.get("content")
    if role not in ROLES:
        fix = f"name one of {', '.join(ROLES)}."
        raise Refused.of(wrong_value(f"{field}.role", role, "there is no such role", fix))
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise Refused.of(wrong_value(f"{field}.content", content, "is neither text nor a list of blocks", "send text."))
    if role == "assistant":
        return [_assistant(blocks, f"{field}.content")]
    results, texts = [], []
    for number, block in enumerate(blocks):
        place = f"{field}.content.{number}"
        if block.get("type") == "tool_result":
            text = text_of(block.get("content"), f"{place}.content")
            results.append({"role": "tool", "content": text, "tool_call_id": str(block.get("tool_use_id", ""))})
        else:
            texts.append(text_of([block], place))
    return [*results, *([{"role": role, "content": "".join(texts)}] if texts or not results else [])]


def _assistant(blocks: list[Mapping[str, Any]], field: str) -> Message:
    text, thinking, calls = "", "", []
    for number, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "thinking":
            thinking += str(block.get("thinking", ""))
        elif kind == "tool_use":
            function = {"name": str(block.get("name", "")), "arguments": block.get("input") or {}}
            calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            text += text_of([block], f"{field}.{number}")
    message: Message = {"role": "assistant", "content": text}
    return {
        **message,
        **({"reasoning_content": thinking} if thinking else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _content(turn: SampledTurn) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if turn.reasoning:
        blocks.append({"type": "thinking", "thinking": turn.reasoning, "signature": ""})
    if turn.content:
        blocks.append({"type": "text", "text": turn.content})
    for call in turn.calls:
        given = arguments_of(call["function"]["arguments"])
        tool = {"name": call["function"]["name"], "input": given if isinstance(given, dict) else {"arguments": given}}
        blocks.append({"type": "tool_use", "id": call["id"], **tool})
    return blocks


def message(request: MessagesRequest, speaker: Speaker, turn: SampledTurn) -> dict[str, Any]:
    """The answer to a request that does not stream."""
    reason = STOP_REASONS[turn.completion.stop_reason]
    return {
        "id": f"msg_{speaker.id}-{turn.number}",
        "type": "message",
        "role": "assistant",
        "model": request.model or speaker.model,
        "content": _content(turn),
        "stop_reason": "tool_use" if turn.calls and reason == "end_turn" else reason,
        "stop_sequence": None,
        "usage": {"input_tokens": turn.prompt_tokens, "output_tokens": len(turn.completion.tokens)},
    }


def events(request: MessagesRequest, speaker: Speaker, turn: SampledTurn) -> Iterator[str]:
    """The answer to a request that streams."""
    whole = message(request, speaker, turn)
    usage = {**whole["usage"], "output_tokens": 0}
    yield _event("message_start", message={**whole, "content": [], "stop_reason": None, "usage": usage})
    for index, block in enumerate(whole["content"]):
        empty, deltas = _parts(block)
        yield _event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    delta = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", delta=delta, usage=whole["usage"])
    yield _event("message_stop")


def _parts(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it begins, and what is added to it."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    if block["type"] == "thinking":
        return {**block, "thinking": ""}, [{"type": "thinking_delta", "thinking": block["thinking"]}]
    return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]


def _event(kind: str, **fields: Any) -> str:
    return event({"type": kind, **fields}, kind)

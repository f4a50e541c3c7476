"""OpenAI's responses: requests to what they ask of the policy, turns to answers."""

import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from pydantic import BaseModel, Field

from millrace.errors import wrong_value
from millrace.validation import limits
from services.rollout.dialects.chat_completions import calls_allowed, message_of
from services.rollout.dialects.histories import history, text_of
from services.rollout.dialects.requests import Refused, event
from services.rollout.dialects.turns import SampledTurn, Speaker, TurnRequest
from services.rollout.engine import StopReason
from services.rollout.episode.chat import Message

Histories = MutableMapping[str, Sequence[Message]]
"""The messages up to each response that a client may continue, by the response's id."""


class ResponsesRequest(BaseModel):
    """What is read of a request. temperature, top_p and the effort of `reasoning` are the job's."""

    model: str = ""
    input: str | list[dict[str, Any]] = Field(max_length=64 << 20)
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=1024)
    tool_choice: Any = None
    max_output_tokens: int | None = Field(None, ge=1, le=limits.MOST_TOKENS)
    text: dict[str, Any] | None = None
    stream: bool | None = None

    def turn_request(self, histories: Histories) -> TurnRequest:
        """What the request asks of the policy. Raises Refused."""
        kind = ((self.text or {}).get("format") or {}).get("type", "text")
        if kind != "text":
            reason = "a format would change what the policy samples"
            raise Refused.of(wrong_value("text.format.type", kind, reason, "ask for the format in the prompt."))
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return TurnRequest(
            messages=[*first, *self._continued(histories), *self._new_messages()],
            tools=[_tool(tool, f"tools.{number}") for number, tool in enumerate(self.tools or ())],
            max_tokens=self.max_output_tokens,
            calls=calls_allowed(self.tool_choice),
        )

    def _continued(self, histories: Histories) -> Sequence[Message]:
        """The messages up to the response that the request continues. Raises Refused."""
        if self.previous_response_id is None:
            return ()
        known = histories.get(self.previous_response_id)
        if known is None:
            why, fix = "there is no such response in this session", "send the whole input."
            raise Refused.of(wrong_value("previous_response_id", self.previous_response_id, why, fix))
        return known

    def _new_messages(self) -> list[Message]:
        """The messages of `input`. Raises Refused."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return _merged([_item(item, f"input.{number}") for number, item in enumerate(self.input)])


def _tool(tool: Mapping[str, Any], field: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        reason = "only functions can be called here"
        raise Refused.of(wrong_value(f"{field}.type", tool.get("type"), reason, "leave it out."))
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _item(item: Mapping[str, Any], field: str) -> Message:
    """An item of the input as a message; those of one turn are merged later."""
    kind = item.get("type", "message")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id", ""), "type": "function", "function": function}
        return history([{"role": "assistant", "tool_calls": [call]}], field)[0]
    if kind == "function_call_output":
        text = text_of(item.get("output"), f"{field}.output")
        return {"role": "tool", "content": text, "tool_call_id": str(item.get("call_id", ""))}
    if kind == "reasoning":
        parts = item.get("content") or ()
        thought = "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
        return {"role": "assistant", "content": "", **({"reasoning_content": thought} if thought else {})}
    if kind != "message":
        reason = "there is no such item here"
        raise Refused.of(wrong_value(f"{field}.type", kind, reason, "send messages, function calls and their outputs."))
    return history([item], field)[0]


def _merged(messages: list[Message]) -> list[Message]:
    """The messages, with those of the policy that follow each other as one: they are the items of one turn."""
    merged: list[Message] = []
    for message in messages:
        if merged and message["role"] == merged[-1]["role"] == "assistant":
            before = merged[-1]
            calls = [*before.get("tool_calls", ()), *message.get("tool_calls", ())]
            both = {**before, **message, "content": before["content"] + message["content"]}
            merged[-1] = {**both, **({"tool_calls": calls} if calls else {})}
        else:
            merged.append(message)
    return merged


def response(
    request: ResponsesRequest, speaker: Speaker, histories: Histories, asked: TurnRequest, turn: SampledTurn
) -> dict[str, Any]:
    """The answer to a request that does not stream. Adds its history to `histories`."""
    name = f"resp_{speaker.id}-{turn.number}"
    spoken = asked.messages[1:] if request.instructions else asked.messages
    histories[name] = [*spoken, message_of(turn)]
    cut = turn.completion.stop_reason is StopReason.LENGTH
    sampled = len(turn.completion.tokens)
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": request.instructions,
        "metadata": {},
        "model": request.model or speaker.model,
        "output": _output(speaker, turn),
        "parallel_tool_calls": True,
        "previous_response_id": request.previous_response_id,
        "temperature": speaker.temperature,
        "top_p": speaker.top_p,
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "usage": {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.prompt_tokens + sampled,
        },
    }


def error_event(refused: Refused) -> str:
    """The end of a stream that fails."""
    kind = refused.kind.value
    return event({"type": "error", "code": kind.code, "message": str(refused), "param": refused.field}, "error")


def _output(speaker: Speaker, turn: SampledTurn) -> list[dict[str, Any]]:
    name, items = f"{speaker.id}-{turn.number}", list[dict[str, Any]]()
    if turn.reasoning:
        thought = [{"type": "reasoning_text", "text": turn.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": thought})
    if turn.content or not turn.calls:
        text = {"type": "output_text", "text": turn.content, "annotations": []}
        items.append(
            {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": "completed", "content": [text]}
        )
    for number, call in enumerate(turn.calls):
        known = {"type": "function_call", "id": f"fc_{name}-{number}", "call_id": call["id"], "status": "completed"}
        items.append({**known, **call["function"]})
    return items


def events(
    request: ResponsesRequest, speaker: Speaker, histories: Histories, asked: TurnRequest, turn: SampledTurn
) -> Iterator[str]:
    """The answer to a request that streams."""
    for number, (kind, fields) in enumerate(_kinds(response(request, speaker, histories, asked, turn))):
        yield event({"type": kind, "sequence_number": number, **fields}, kind)


def _kinds(whole: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(whole["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            yield "response.output_item.added", {"output_index": index, "item": {**item, "content": []}}
            yield from _text(at, item["content"][0])
        elif item["type"] == "function_call":
            yield "response.output_item.added", {"output_index": index, "item": {**item, "arguments": ""}}
            yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
            named = {"arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", {**at, **named}
        else:
            yield "response.output_item.added", {"output_index": index, "item": item}
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{whole['status']}", {"response": whole}


def _text(at: dict[str, Any], part: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    at = {**at, "content_index": 0}
    yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
    yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": []}
    yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
    yield "response.content_part.done", {**at, "part": part}

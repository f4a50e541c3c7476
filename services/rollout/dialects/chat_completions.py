"""OpenAI's chat completions: requests to what they ask of the policy, turns to answers."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field

from millrace.errors import wrong_value
from millrace.validation import limits
from services.rollout.dialects.histories import history
from services.rollout.dialects.requests import Refused, event, openai_error
from services.rollout.dialects.turns import SampledTurn, Speaker, TurnRequest
from services.rollout.engine import Completion, StopReason

DONE = "data: [DONE]\n\n"
"""The end of a stream."""


class ChatRequest(BaseModel):
    """What is read of a request. temperature, top_p, seed, penalties and other fields of sampling are the job's and are
    not read."""

    model: str = ""
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=100_000)
    tools: list[dict[str, Any]] | None = Field(None, max_length=1024)
    tool_choice: Any = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_tokens: int | None = Field(None, ge=1, le=limits.MOST_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=limits.MOST_TOKENS)
    stop: Any = None
    n: int | None = None
    response_format: dict[str, Any] | None = None

    def turn_request(self) -> TurnRequest:
        """What the request asks of the policy. Raises Refused."""
        if self.n not in (None, 1):
            raise Refused.of(wrong_value("n", self.n, "a request samples one turn at a time", "leave it out."))
        if self.top_logprobs:
            reason = "only the sampled tokens have log-probabilities here"
            raise Refused.of(wrong_value("top_logprobs", self.top_logprobs, reason, "leave it out."))
        kind = (self.response_format or {}).get("type", "text")
        if kind != "text":
            reason = "a format would change what the model samples"
            raise Refused.of(wrong_value("response_format.type", kind, reason, "ask for the format in the prompt."))
        return TurnRequest(
            messages=history(self.messages),
            tools=self.tools or (),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=stops(self.stop),
            calls=calls_allowed(self.tool_choice),
        )


def calls_allowed(choice: Any) -> bool:
    """Whether calls of tools are returned as such. Raises Refused for a choice that would force a call."""
    if choice in (None, "auto", "none"):
        return bool(choice != "none")
    reason = "a call that is forced would not be sampled by the policy"
    raise Refused.of(wrong_value("tool_choice", choice, reason, "give auto or none."))


def stops(given: Any) -> tuple[str, ...]:
    """The strings that end a turn. Raises Refused."""
    texts = [given] if isinstance(given, str) else given or []
    if not isinstance(texts, list) or len(texts) > 64 or not all(isinstance(text, str) and text for text in texts):
        raise Refused.of(wrong_value("stop", given, "is not text or a list of at most 64 texts", "give texts."))
    return tuple(texts)


def finish_reason(turn: SampledTurn) -> str:
    """Why the turn ended, in OpenAI's words."""
    if turn.completion.stop_reason is StopReason.LENGTH:
        return "length"
    return "tool_calls" if turn.calls else "stop"


def message_of(turn: SampledTurn) -> dict[str, Any]:
    """The message of a turn."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.content or (None if turn.calls else "")}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = turn.calls
    return message


def usage(turn: SampledTurn) -> dict[str, int]:
    """Tokens of the request and of the turn."""
    sampled = len(turn.completion.tokens)
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": turn.prompt_tokens + sampled,
    }


def completion(request: ChatRequest, speaker: Speaker, turn: SampledTurn) -> dict[str, Any]:
    """The answer to a request that does not stream."""
    choice = {"index": 0, "message": message_of(turn), "finish_reason": finish_reason(turn)}
    choice["logprobs"] = logprobs(turn.completion, speaker.decode) if request.logprobs else None
    return {**_head(request, speaker, turn, "chat.completion"), "choices": [choice], "usage": usage(turn)}


def chunks(request: ChatRequest, speaker: Speaker, turn: SampledTurn) -> Iterator[str]:
    """The answer to a request that streams."""
    head = _head(request, speaker, turn, "chat.completion.chunk")
    whole = message_of(turn)
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{name: whole[name]} for name in ("reasoning_content", "content") if whole.get(name)]
    deltas += [{"tool_calls": [{"index": number, **call}]} for number, call in enumerate(turn.calls)]
    of_tokens = logprobs(turn.completion, speaker.decode) if request.logprobs else None
    for number, delta in enumerate(deltas):
        choice = {"index": 0, "delta": delta, "logprobs": of_tokens if number == len(deltas) - 1 else None}
        yield event({**head, "choices": [{**choice, "finish_reason": None}]})
    yield event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason(turn)}]})
    if (request.stream_options or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": usage(turn)})
    yield DONE


def error_event(refused: Refused) -> str:
    """The end of a stream that fails."""
    return event(openai_error(refused))


def _head(request: ChatRequest, speaker: Speaker, turn: SampledTurn, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{speaker.id}-{turn.number}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model or speaker.model,
    }


def logprobs(completion: Completion, decode: Callable[[Sequence[int]], str]) -> Mapping[str, Any]:
    """The log-probability of each sampled token, nats."""
    return {
        "content": [
            {
                "token": (text := decode([token])),
                "logprob": value,
                "bytes": list(text.encode()),
                "top_logprobs": [],
            }
            for token, value in zip(completion.tokens.tolist(), completion.logprobs.tolist(), strict=True)
        ]
    }

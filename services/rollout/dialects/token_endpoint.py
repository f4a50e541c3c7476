"""Tokens in, tokens out: `POST /inference/v1/generate` in vLLM's shape, for clients that make the tokens themselves."""

from typing import Any

from pydantic import BaseModel, Field

from millrace.validation import limits
from services.rollout.dialects.chat_completions import stops
from services.rollout.dialects.turns import SampledTurn, Speaker, TurnRequest
from services.rollout.engine import StopReason


class SamplingParams(BaseModel):
    """What is read of vLLM's sampling parameters. Temperature, top-p, top-k and seed are the job's, and a turn ends at
    the model's own end-of-turn tokens."""

    max_tokens: int | None = Field(None, ge=1, le=limits.MOST_TOKENS)
    stop: Any = None


class GenerateRequest(BaseModel):
    """What is read of a request. cache_salt and priority are accepted and have no effect: sessions of one job share
    their prefixes."""

    request_id: str = Field("", max_length=256)
    model: str | None = None
    token_ids: list[int] = Field(min_length=1, max_length=limits.MOST_TOKENS)
    sampling_params: SamplingParams = Field(default_factory=SamplingParams)
    cache_salt: str | None = Field(None, max_length=1024)
    priority: int = 0

    def turn_request(self) -> TurnRequest:
        """The limits of the turn. Raises Refused."""
        return TurnRequest(max_tokens=self.sampling_params.max_tokens, stop=stops(self.sampling_params.stop))


def generated(request: GenerateRequest, speaker: Speaker, turn: SampledTurn) -> dict[str, Any]:
    """The answer: the very tokens that are trained, each with its log-probability (nats) and the weight versions."""
    completion = turn.completion
    values = zip(completion.tokens.tolist(), completion.logprobs.tolist(), strict=True)
    content = [{"token": f"token_id:{token}", "token_id": token, "logprob": value} for token, value in values]
    choice = {
        "index": 0,
        "token_ids": completion.tokens.tolist(),
        "logprobs": {"content": content},
        "finish_reason": "length" if completion.stop_reason is StopReason.LENGTH else "stop",
        "weight_versions": [{"version": str(s.version), "start": s.start, "end": s.end} for s in completion.versions],
    }
    return {
        "request_id": request.request_id or f"generate-{speaker.id}-{turn.number}",
        "turn": turn.number,
        "choices": [choice],
    }

"""The OpenAI-compatible endpoint of a pool's replica, for judges and for callers with the token of the deployment.

| path | for |
|---|---|
| `GET /v1/models` | the one model there is |
| `POST /v1/chat/completions` | a reply of the model, which nothing records |

A replica whose model does not reply answers 404, one that is not ready 503, and one that is full 429.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from millrace.errors import MillraceError, wrong_value
from millrace.validation import limits
from services.rollout.dialects import chat_completions
from services.rollout.dialects.chat_completions import ChatRequest
from services.rollout.dialects.refusals import Refusals, Refused
from services.rollout.dialects.requests import Answer, answered_or_refused, body_of, check_token, while_connected
from services.rollout.dialects.streams import streamed
from services.rollout.dialects.turns import SampledTurn, Speaker
from services.rollout.engine import Sampling
from services.rollout.pools.replica import Conversation, PoolReplica


class ReplyRequest(ChatRequest):
    """What is read of a request. Unlike in a session, what it says of sampling holds."""

    temperature: float | None = Field(None, ge=0.0, le=limits.HIGHEST_TEMPERATURE, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, le=limits.MOST_TOKENS)
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the model's chat template."""

    def conversation(self) -> Conversation:
        """The messages, and how the model is to reply. Raises Refused."""
        asked = self.turn_request()
        if asked.tools:
            raise Refused.of(wrong_value("tools", "given", "replies call no tools here", "leave them out."))
        sampling = Sampling(
            max_response_tokens=asked.max_tokens or limits.MOST_TOKENS,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            stop=asked.stop,
        )
        return Conversation(asked.messages, sampling, self.chat_template_kwargs or {})


def application(replica: PoolReplica, secret: str) -> Starlette:
    """The ASGI application. `secret` is the token of the deployment; empty: there is none."""
    model = PoolEndpoint(replica, secret)
    return Starlette(
        routes=[
            _route("/healthz", model.health, "GET"),
            _route("/v1/models", model.models, "GET"),
            _route("/v1/chat/completions", model.chat_completions, "POST"),
        ]
    )


def _route(path: str, answer: Answer, method: str) -> Route:
    return Route(path, partial(answered_or_refused, answer=answer), methods=[method])


class PoolEndpoint:
    """Answers requests."""

    def __init__(self, replica: PoolReplica, secret: str) -> None:
        self._replica = replica
        self._secret = secret

    async def health(self, request: Request) -> Response:
        """Whether the process answers."""
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        """The one model there is, under the name of its pool."""
        check_token(request, self._secret)
        self._replica.check_replies()
        entry: Mapping[str, Any] = {"id": self._replica.pool, "object": "model", "created": 0, "owned_by": "millrace"}
        return JSONResponse({"object": "list", "data": [{**entry, "max_model_len": self._replica.context}]})

    async def chat_completions(self, request: Request) -> Response:
        """A reply."""
        check_token(request, self._secret)
        body = await body_of(request, ReplyRequest)
        saying, speaker = self._reply(body.conversation()), self._speaker()
        if body.stream:
            events = partial(chat_completions.chunks, body, speaker)
            return await streamed(request, saying, events, chat_completions.error_event)
        turn = await while_connected(request, saying)
        return JSONResponse(chat_completions.completion(body, speaker, turn))

    async def _reply(self, conversation: Conversation) -> SampledTurn:
        """Raises Refused."""
        try:
            return await self._replica.reply(conversation)
        except Refused:
            raise
        except MillraceError as error:
            raise Refused(Refusals.UNAVAILABLE, error.what, error.fix) from error

    def _speaker(self) -> Speaker:
        return Speaker(self._replica.member_id, self._replica.pool, self._replica.decode)

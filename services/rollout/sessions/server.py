"""The HTTP server of a replica's sessions.

| path | for |
|---|---|
| `POST /sessions` | agents that run elsewhere: claims an episode, with the token of the deployment |
| `GET /sessions/ID`, `POST …/reward`, `POST …/end` | the episode: what is known of it, its reward, its end |
| `/sessions/ID/v1/…` | the policy, as OpenAI's and Anthropic's clients ask it |
| `POST /inference/v1/generate` | the policy, tokens in and tokens out |
"""

from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, TypeVar

import structlog
from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from millrace.validation import limits
from millrace.wire.channel import token
from millrace.wire.tls import scheme
from services.rollout.dialects import anthropic_messages, chat_completions, responses, token_endpoint
from services.rollout.dialects.anthropic_messages import MessagesRequest
from services.rollout.dialects.chat_completions import ChatRequest
from services.rollout.dialects.requests import (
    Answer,
    Events,
    Refusals,
    Refused,
    answered_or_refused,
    anthropic_error,
    body_of,
    check_token,
    event,
    key_of,
    streamed,
    while_connected,
)
from services.rollout.dialects.responses import ResponsesRequest
from services.rollout.dialects.token_endpoint import GenerateRequest
from services.rollout.dialects.turns import SampledTurn
from services.rollout.member.process import HttpEndpoint
from services.rollout.sessions.open_sessions import Api, OpenSessions
from services.rollout.sessions.session import Session

log = structlog.get_logger(__name__)
Body = TypeVar("Body", bound=BaseModel)
OF_ANTHROPIC = (Api.MESSAGES, Api.COUNT_TOKENS)
"""What Anthropic's clients ask for."""


class Reward(BaseModel):
    """The body of `POST /sessions/ID/reward`."""

    reward: float = Field(ge=-limits.LARGEST_WEIGHT, le=limits.LARGEST_WEIGHT, allow_inf_nan=False)
    turn: int | None = None


class End(BaseModel):
    """The body of `POST /sessions/ID/end`, which may be empty."""

    reward: float | None = Field(None, ge=-limits.LARGEST_WEIGHT, le=limits.LARGEST_WEIGHT, allow_inf_nan=False)


class SessionServer(HttpEndpoint):
    """Serves the sessions of one replica."""

    def __init__(
        self, sessions: OpenSessions, host: str, port: int, reached_at: str = "127.0.0.1", app: object = None
    ) -> None:
        """Takes the arguments of `HttpEndpoint`. `reached_at`: name or address by which agents reach this host. `app`:
        instead of the application."""
        super().__init__(app or application(sessions, token()), host, port)
        self.url = f"{scheme()}://{reached_at}:{self.port}"
        sessions.endpoint = self


def application(sessions: OpenSessions, secret: str) -> Starlette:
    """The ASGI application. `secret` is the token of the deployment; empty: there is none."""
    desk = Desk(sessions, secret)
    one, policy = "/sessions/{id}", "/sessions/{id}/v1"
    return Starlette(
        routes=[
            Route("/healthz", desk.health, methods=["GET"]),
            desk.route(Api.CLAIM, "/sessions", desk.claim),
            desk.route(Api.DESCRIBE, one, desk.describe, "GET"),
            desk.route(Api.REWARD, f"{one}/reward", desk.reward),
            desk.route(Api.END, f"{one}/end", desk.end),
            desk.route(Api.MODELS, f"{policy}/models", desk.models, "GET"),
            desk.route(Api.CHAT_COMPLETIONS, f"{policy}/chat/completions", desk.chat_completions),
            desk.route(Api.RESPONSES, f"{policy}/responses", desk.responses),
            desk.route(Api.MESSAGES, f"{policy}/messages", desk.messages),
            desk.route(Api.COUNT_TOKENS, f"{policy}/messages/count_tokens", desk.count),
            desk.route(Api.GENERATE, "/inference/v1/generate", desk.generate),
            desk.route(Api.GENERATE, f"{one}/inference/v1/generate", desk.generate),
        ]
    )


def anthropic_event(refused: Refused) -> str:
    """The end of a stream of Anthropic's messages that fails."""
    return event(anthropic_error(refused), "error")


class Desk:
    """Answers requests."""

    def __init__(self, sessions: OpenSessions, secret: str) -> None:
        self._sessions = sessions
        self._metrics = sessions.metrics
        self._secret = secret

    def route(self, api: Api, path: str, answer: Answer, method: str = "POST") -> Route:
        """Requests to `path`, which are counted. A refusal has the form that the clients of `api` expect."""

        async def answered(request: Request) -> Response:
            response = await answered_or_refused(request, answer, anthropic=api in OF_ANTHROPIC)
            self._metrics.answered(api, response.status_code)
            return response

        return Route(path, answered, methods=[method])

    async def health(self, request: Request) -> Response:
        """Whether the process answers."""
        return JSONResponse({"status": "ok"})

    async def claim(self, request: Request) -> Response:
        """The episode that has waited longest: its row, its base URLs and its key."""
        check_token(request, self._secret)
        session = self._sessions.claim()
        log.debug("session claimed", session=session.id, caller=request.client.host if request.client else "")
        assert self._sessions.endpoint is not None
        url = f"{self._sessions.endpoint.url}/sessions/{session.id}"
        access = {"key": session.key, "url": url, "openai_base_url": f"{url}/v1", "anthropic_base_url": url}
        return JSONResponse({**access, **self._described(session)}, 201)

    async def describe(self, request: Request) -> Response:
        """What is known of an episode."""
        return JSONResponse(self._described(self._session(request)))

    async def reward(self, request: Request) -> Response:
        """Adds to the reward of the episode, or of one of its turns."""
        session, body = await self._asked(request, Reward)
        session.reward(body.reward, body.turn)
        return JSONResponse({"id": session.id})

    async def end(self, request: Request) -> Response:
        """Ends the episode; its reward may come with it."""
        session, body = await self._asked(request, End)
        if body.reward is not None:
            session.reward(body.reward)
        session.end()
        return JSONResponse({"id": session.id, "turns": session.turns})

    async def models(self, request: Request) -> Response:
        """The one model there is."""
        policy = self._session(request).policy
        entry = {"id": policy.model, "object": "model", "created": 0, "owned_by": "millrace"}
        return JSONResponse({"object": "list", "data": [{**entry, "max_model_len": policy.longest}]})

    async def chat_completions(self, request: Request) -> Response:
        """A turn, for OpenAI's chat completions."""
        session, body = await self._asked(request, ChatRequest)
        sampling = session.sample_turn(body.turn_request())
        if body.stream:
            events = partial(chat_completions.chunks, body, session.speaker)
            return await self._stream(Api.CHAT_COMPLETIONS, request, sampling, events, chat_completions.error_event)
        answer = partial(chat_completions.completion, body, session.speaker)
        return await self._turn(Api.CHAT_COMPLETIONS, request, sampling, answer)

    async def responses(self, request: Request) -> Response:
        """A turn, for OpenAI's responses."""
        session, body = await self._asked(request, ResponsesRequest)
        asked = body.turn_request(session.histories)
        if body.stream:
            events = partial(responses.events, body, session.speaker, session.histories, asked)
            return await self._stream(Api.RESPONSES, request, session.sample_turn(asked), events, responses.error_event)
        answer = partial(responses.response, body, session.speaker, session.histories, asked)
        return await self._turn(Api.RESPONSES, request, session.sample_turn(asked), answer)

    async def messages(self, request: Request) -> Response:
        """A turn, for Anthropic's messages."""
        session, body = await self._asked(request, MessagesRequest)
        sampling = session.sample_turn(body.turn_request())
        if body.stream:
            events = partial(anthropic_messages.events, body, session.speaker)
            return await self._stream(Api.MESSAGES, request, sampling, events, anthropic_event)
        return await self._turn(
            Api.MESSAGES, request, sampling, partial(anthropic_messages.message, body, session.speaker)
        )

    async def count(self, request: Request) -> Response:
        """The tokens of a request to Anthropic's messages."""
        session, body = await self._asked(request, MessagesRequest)
        return JSONResponse({"input_tokens": await session.count(body.turn_request())})

    async def generate(self, request: Request) -> Response:
        """A turn, for clients that make the tokens themselves."""
        session, body = await self._asked(request, GenerateRequest)
        sampling = session.sample_after(body.token_ids, body.turn_request())
        return await self._turn(
            Api.GENERATE, request, sampling, partial(token_endpoint.generated, body, session.speaker)
        )

    async def _turn(
        self,
        api: Api,
        request: Request,
        sampling: Coroutine[Any, Any, SampledTurn],
        answer: Callable[[SampledTurn], dict[str, Any]],
    ) -> Response:
        """The turn of `sampling` as one answer."""
        turn = await while_connected(request, sampling)
        response = JSONResponse(answer(turn))
        self._metrics.turn(api, request.state.arrived, turn.engine_s)
        return response

    async def _stream(
        self,
        api: Api,
        request: Request,
        sampling: Coroutine[Any, Any, SampledTurn],
        events: Events,
        refused: Callable[[Refused], str],
    ) -> Response:
        """The turn of `sampling` as a stream."""

        def counted(turn: SampledTurn) -> Iterable[str]:
            sent = events(turn)
            self._metrics.turn(api, request.state.arrived, turn.engine_s)
            return sent

        return await streamed(request, sampling, counted, refused)

    async def _asked(self, request: Request, model: type[Body]) -> tuple[Session, Body]:
        """The session of a request, and its body, which is as long as the job allows. Raises Refused."""
        session = self._session(request)
        with session.reading() as largest:
            return session, await body_of(request, model, largest)

    def _session(self, request: Request) -> Session:
        """The session of a request: of its path, or of its header `X-Session-ID`. Raises Refused."""
        session_id = request.path_params.get("id") or request.headers.get("x-session-id", "")
        if not session_id:
            raise Refused(Refusals.UNKNOWN, "the request names no session.", "send the header X-Session-ID.")
        return self._sessions.find(session_id, key_of(request))

    def _described(self, session: Session) -> dict[str, Any]:
        description = {"id": session.id, "model": session.policy.model, "row": session.prompt.row_fields()}
        return {**description, "turns": session.turns, "seconds_left": round(session.seconds_left, 3)}

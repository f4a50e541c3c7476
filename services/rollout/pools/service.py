"""A pool's replica as a process: its gRPC service, which translates between the wire and the replica, its HTTP
endpoint, and its life.

The endpoint is OpenAI-compatible, for judges and for callers with the token of the deployment:

| path | for |
|---|---|
| `GET /v1/models` | the one model there is |
| `POST /v1/chat/completions` | a reply of the model, which nothing records |

A replica whose model does not reply answers 404, one that is not ready 503, and one that is full 429.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import grpc
import numpy as np
from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from millrace.contracts.v1 import rollout_pb2, scoring_pb2, scoring_pb2_grpc
from millrace.errors import InvalidRequest, InvalidState, MillraceError, wrong_value
from millrace.ids import JobId
from millrace.spec.pool import LONGEST_NAME, NAME, ROLLOUT
from millrace.validation import limits
from millrace.wire.arrays import unpack_tokens
from millrace.wire.channel import Peer, token
from millrace.wire.server import Context
from services.rollout.dialects import chat_completions
from services.rollout.dialects.chat_completions import ChatRequest
from services.rollout.dialects.requests import (
    Answer,
    Refusals,
    Refused,
    answered_or_refused,
    body_of,
    check_token,
    streamed,
    while_connected,
)
from services.rollout.dialects.turns import SampledTurn, Speaker
from services.rollout.engine import Sampling, TokenSequence
from services.rollout.engines import create_scoring
from services.rollout.member.member import MemberMetrics
from services.rollout.member.process import HttpEndpoint, MemberProcess, Reached, signals
from services.rollout.pools.replica import Conversation, PoolReplica


class ScoringServicer(scoring_pb2_grpc.ScoringServicer):
    """Serves one replica."""

    def __init__(self, replica: PoolReplica) -> None:
        self._replica = replica
        self._tasks: set[asyncio.Task[Any]] = set()

    async def Configure(
        self, request: rollout_pb2.ConfigureRolloutRequest, context: Context
    ) -> rollout_pb2.ConfigureRolloutResponse:
        # A model that is half loaded when its caller goes away is loaded to the end: the caller asks again.
        task = asyncio.create_task(self._replica.configure(JobId(request.job_id), request.spec))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def ScoreTokens(
        self, request: scoring_pb2.ScoreTokensRequest, context: Context
    ) -> scoring_pb2.ScoreTokensResponse:
        sequences = [_sequence(each) for each in request.sequences]
        scores = await self._replica.score_tokens(request.job_id, request.pool, sequences, request.top)
        return scoring_pb2.ScoreTokensResponse(scores=[each.message() for each in scores])

    async def ScoreConversations(
        self, request: scoring_pb2.ScoreConversationsRequest, context: Context
    ) -> scoring_pb2.ScoreConversationsResponse:
        conversations = [(_prompt(each.prompt), each.answer) for each in request.conversations]
        response = scoring_pb2.ScoreConversationsResponse()
        for found in await self._replica.rewards(request.job_id, request.pool, conversations):
            if isinstance(found, str):
                response.scores.add(failure=found)
            else:
                response.scores.add(reward=found)
        return response

    async def GetStatus(self, request: scoring_pb2.ScoringStatusRequest, context: Context) -> scoring_pb2.ScoringStatus:
        replica = self._replica
        load = replica.load()
        return scoring_pb2.ScoringStatus(
            member_id=replica.member_id,
            pool=replica.pool,
            state=replica.state,
            job_id=replica.job_id,
            running=load.running,
            waiting=load.waiting,
            tokens=replica.tokens,
            engine=replica.engine_name,
            engine_release=replica.engine_release,
            failure=replica.failure,
        )


def _sequence(message: scoring_pb2.TokenSequence) -> TokenSequence:
    """Raises InvalidRequest for half a token, and for spans that are not in order or not in the sequence."""
    try:
        tokens_t = unpack_tokens(message.tokens)
    except ValueError as error:
        raise InvalidRequest("tokens: the array has half an element.", "send int32.") from error
    end = 1
    for span in message.scored:
        if not end <= span.start < span.end <= len(tokens_t):
            what = f"scored: [{span.start}, {span.end}): is not after {end - 1} and within {len(tokens_t)} tokens."
            raise InvalidRequest(what, "send spans in order, from the second token on.")
        end = span.end
    places = [np.arange(span.start, span.end) for span in message.scored]
    if not places:
        raise InvalidRequest("scored: nothing of a sequence is to be scored.", "send at least one span.")
    return TokenSequence(tokens_t, np.concatenate(places))


def _prompt(text: str) -> Any:
    """Raises InvalidRequest for what is neither a list of messages nor text."""
    try:
        prompt = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"prompt: is not JSON: {error}.", "send a list of messages, or a text.") from error
    if not isinstance(prompt, str | list):
        raise InvalidRequest("prompt: is neither a list nor text.", "send a list of messages, or a text.")
    return prompt


def servicers(replica: PoolReplica) -> Mapping[str, Callable[[grpc.aio.Server], None]]:
    """The replica's service by its full name, for `millrace.wire.server.Server`."""
    servicer = ScoringServicer(replica)
    return {"millrace.v1.Scoring": lambda server: scoring_pb2_grpc.add_ScoringServicer_to_server(servicer, server)}


def check_pool_option(pool: str, engine: str, nodes: int) -> None:
    """Checks the option --pool of a replica's process. Raises NotFound and InvalidState."""
    if pool == ROLLOUT:
        return
    if re.fullmatch(NAME, pool) is None or len(pool) > LONGEST_NAME:
        fix = "use small letters, digits, _ and -, as in the job's pools."
        raise InvalidState(f"--pool: {pool}: is not the name of a pool.", fix)
    create_scoring(engine)
    if nodes > 1:
        raise InvalidState("--nodes: a replica of a pool lies on one host.", "leave it out.")


async def serve(replica: PoolReplica, reached: Reached) -> int:
    """Serves until the replica is asked to stop, or its engine dies; returns the exit status. Raises MillraceError if
    the coordinator refuses the replica."""
    http = HttpEndpoint(application(replica, token()), reached.bind, reached.sessions_port)
    coordinator, metrics = Peer(reached.coordinator), MemberMetrics(replica)
    process = MemberProcess(replica, reached, coordinator, servicers(replica), metrics, http)
    await process.start()
    await process.live(signals())
    return await process.stop()


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

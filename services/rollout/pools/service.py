"""A pool's replica as a process: its gRPC service, which translates between the wire and the replica, and its life."""

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import numpy as np

from millrace.contracts.v1 import rollout_pb2, scoring_pb2, scoring_pb2_grpc
from millrace.errors import InvalidRequest, InvalidState
from millrace.ids import JobId
from millrace.spec.pool import LONGEST_NAME, NAME, ROLLOUT
from millrace.wire.arrays import unpack_tokens
from millrace.wire.channel import Peer, token
from millrace.wire.server import Context
from services.rollout.engine import TokenSequence
from services.rollout.engines import create_scoring
from services.rollout.member.member import MemberMetrics
from services.rollout.member.process import HttpEndpoint, MemberProcess, Reached, signals
from services.rollout.pools.endpoint import application
from services.rollout.pools.replica import PoolReplica


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

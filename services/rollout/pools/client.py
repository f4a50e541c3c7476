"""Calls of a pool: spread over its replicas, repeated at another one, waiting while there is none."""

import asyncio
import random
from collections import Counter

import structlog

from millrace.contracts.method import Request, Response, Unary
from millrace.contracts.methods import ScoringRpc
from millrace.errors import InvalidState, Unavailable
from millrace.ids import JobId
from millrace.spec.pool import Pool
from millrace.wire.channel import Peer
from millrace.wire.deadlines import DEADLINES_S
from services.rollout.pools.members import RETRY_S, PoolMembers

log = structlog.get_logger(__name__)
AT_ONCE = 4
"""Requests of one caller that a pool has at a time. The others wait here."""
ATTEMPTS = 4
"""Replicas that fail at one request before it is given up."""


class PoolClient:
    """The replicas of one pool, for one job. `close` ends the calls in progress."""

    def __init__(self, coordinator: Peer, job_id: JobId, pool: Pool) -> None:
        self.pool = pool
        self.job_id = job_id
        self.members = PoolMembers(coordinator, job_id, pool.name)
        methods = (ScoringRpc.ScoreTokens, ScoringRpc.ScoreConversations)
        self._deadlines = {**DEADLINES_S, **{method.key: pool.timeout_s for method in methods}}
        self._peers: dict[str, Peer] = {}
        self._in_flight: Counter[str] = Counter()
        self._room = asyncio.Semaphore(AT_ONCE)

    async def call(self, method: Unary[Request, Response], request: Request) -> Response:
        """The answer of the replica that has fewest of this caller's requests; where one fails, of another. Waits as
        long as the pool has no replica. Raises Unavailable where ATTEMPTS of them failed, and what a replica says of
        the request itself."""
        async with self._room:
            failed: set[str] = set()
            for attempt in range(1, ATTEMPTS + 1):
                address = await self._least_busy(failed)
                self._in_flight[address] += 1
                try:
                    return await self._peer(address).call(method, request)
                except (Unavailable, InvalidState) as error:
                    failed.add(address)
                    self.members.doubt()
                    log.warning("a replica of a pool failed", pool=self.pool.name, address=address, error=str(error))
                    if attempt == ATTEMPTS:
                        what = f"{attempt} replicas of the pool {self.pool.name} failed, the last one: {error.what}"
                        raise Unavailable(what, error.fix) from error
                finally:
                    self._in_flight[address] -= 1
        raise AssertionError("ATTEMPTS is at least 1")

    async def _least_busy(self, failed: set[str]) -> str:
        """A replica that has not failed at the request; where all have, any of them, after a moment."""
        ready = [member.address for member in await self.members.ready()]
        others = [address for address in ready if address not in failed]
        if not others:
            await asyncio.sleep(RETRY_S)
            others = [member.address for member in await self.members.ready()]
        return min(others, key=lambda address: (self._in_flight[address], random.random()))

    def _peer(self, address: str) -> Peer:
        if address not in self._peers:
            self._peers[address] = Peer(address, self._deadlines)
        return self._peers[address]

    async def close(self) -> None:
        for peer in self._peers.values():
            await peer.close()

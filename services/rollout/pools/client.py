"""Calls of a pool: spread over its replicas, repeated at another one, waiting while there is none."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from millrace.contracts.method import Request, Response, Unary
from millrace.contracts.methods import FleetRpc, ScoringRpc
from millrace.contracts.v1 import fleet_pb2
from millrace.errors import InvalidState, Unavailable
from millrace.ids import JobId
from millrace.spec.pool import Pool
from millrace.wire.channel import Peer
from millrace.wire.deadlines import DEADLINES_S

REFRESH_S = 5.0
"""How long the coordinator's answer is believed: replicas that join are asked after that."""
WAIT_S = 25.0
"""How long the coordinator is asked to wait for the first replica of a pool."""
RETRY_S = 1.0


@dataclass(frozen=True)
class PoolMember:
    """The address of a pool's replica."""

    address: str
    """host:port of its gRPC server."""
    endpoint: str
    """host:port of its OpenAI-compatible endpoint; empty if it has none."""


class PoolMembers:
    """The replicas of one pool, for one job."""

    def __init__(self, coordinator: Peer, job_id: JobId, pool: str) -> None:
        """`pool`: its name."""
        self.pool = pool
        self._coordinator = coordinator
        self._job_id = job_id
        self._ready: Sequence[PoolMember] = ()
        self._found_at = -REFRESH_S
        self._finding = asyncio.Lock()

    async def ready(self) -> Sequence[PoolMember]:
        """The replicas that are ready, at least one: waits as long as there is none."""
        while self._asks():
            async with self._finding:
                if self._asks():
                    await self._find()
        return self._ready

    def doubt(self) -> None:
        """One of them failed: the coordinator is asked before the next answer."""
        self._found_at = -REFRESH_S

    def _asks(self) -> bool:
        return not self._ready or time.monotonic() - self._found_at > REFRESH_S

    async def _find(self) -> None:
        """Asks the coordinator once. One that cannot be reached leaves what is known as it is."""
        wait_s = 0.0 if self._ready else WAIT_S
        request = fleet_pb2.FindPoolRequest(job_id=self._job_id, pool=self.pool, wait_s=wait_s)
        found = self._ready
        try:
            answer = await self._coordinator.call(FleetRpc.FindPool, request)
            endpoints = [*answer.endpoints] or [""] * len(answer.addresses)
            found = [PoolMember(*each) for each in zip(answer.addresses, endpoints, strict=True)]
        except Unavailable as error:
            log.info("the replicas of a pool are not known", pool=self.pool, error=str(error))
            await asyncio.sleep(RETRY_S)
        if not found and self._ready:
            log.warning("the pool has no replica", pool=self.pool)
        self._ready, self._found_at = found, time.monotonic()


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
        """The answer of the replica that has fewest of this caller's requests; if one fails, of another. Waits as
        long as the pool has no replica. Raises Unavailable if ATTEMPTS of them failed, and what a replica says of
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
        """A replica that has not failed at the request; if all have, any of them, after a moment."""
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

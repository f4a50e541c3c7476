"""The replicas of a pool that are ready for a job, as the coordinator knows them."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from millrace.contracts.methods import FleetRpc
from millrace.contracts.v1 import fleet_pb2
from millrace.errors import Unavailable
from millrace.ids import JobId
from millrace.wire.channel import Peer

log = structlog.get_logger(__name__)
REFRESH_S = 5.0
"""How long the coordinator's answer is believed: replicas that join are asked after that."""
WAIT_S = 25.0
"""How long the coordinator is asked to wait for the first replica of a pool."""
RETRY_S = 1.0


@dataclass(frozen=True)
class PoolMember:
    """Where a replica of a pool is reached."""

    address: str
    """host:port of its gRPC server."""
    endpoint: str
    """host:port of its OpenAI-compatible endpoint; empty where it has none."""


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

"""Which coordinator leads: a lease in Redis with a holder, an epoch, and an end by Redis' clock.

The lease says when another coordinator may lead. The epoch keeps the state whole: each leader has a higher one, every
write names it, and Redis refuses a write with an old one. So a leader that stood still and wakes up changes nothing.
"""

import asyncio
import contextlib
import json
import time
from dataclasses import asdict, dataclass

import structlog

from millrace.errors import Unavailable
from services.coordinator.store.connection import EPOCH, Connection, StoreDown, Superseded

log = structlog.get_logger(__name__)
LEADER = "millrace:leader"
RENEWALS = 4
"""How often a lease is renewed within its time."""


@dataclass(frozen=True)
class Holder:
    """A coordinator, as others reach it."""

    place: str
    """Host and port of its REST API. No two processes have one at the same time, so a coordinator that starts there
    knows that the one before has ended, and takes its lease at once."""
    grpc: str
    """host:port"""
    rest: str
    """URL"""


class Leadership:
    """This coordinator's lease."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection
        self._held = ""
        self._lease_ms = 0

    @property
    def epoch(self) -> int:
        """Epoch of this coordinator's lease; 0 if it has not led."""
        return self._redis.epoch

    async def take(self, holder: Holder, lease_s: float, *, back: bool = False) -> Holder | None:
        """Takes the lease, if nobody holds it. Answers who holds it otherwise, None if it is taken. With `back` a
        lease of the same place is taken too. Raises StoreDown."""
        mine, lease_ms = json.dumps(asdict(holder)), int(lease_s * 1000)
        arguments = [holder.place, mine, lease_ms, int(back), int(time.time() * 1000)]
        answer = await self._redis.run("lead", [LEADER, EPOCH], arguments)
        if answer[0] is None:
            return Holder(**json.loads(answer[1]))
        self._held, self._lease_ms = mine, lease_ms
        self._redis.lead(int(answer[0]))
        return None

    async def renew(self) -> None:
        """Extends the lease. One that ran out without another leader goes on. Raises Superseded, StoreDown."""
        await self._redis.do("SET", LEADER, self._held, "PX", self._lease_ms)

    async def keep(self) -> None:
        """Renews the lease until cancelled. Raises Superseded."""
        while True:
            await asyncio.sleep(self._lease_ms / 1000 / RENEWALS)
            try:
                await self.renew()
            except StoreDown as error:
                log.warning("the lease is not renewed", error=str(error))
                await self._redis.wait_until_up()
                await self.renew()

    async def release(self) -> None:
        """Ends the lease, so that another coordinator leads at once. A Redis that is down lets it run out."""
        with contextlib.suppress(StoreDown, Superseded):
            await self._redis.do("DEL", LEADER)

    async def still_ours(self) -> None:
        """Raises Superseded if another coordinator leads."""
        if int(await self._redis.do("GET", EPOCH) or 0) != self.epoch:
            raise self._redis.superseded()

    async def holder(self) -> Holder:
        """Who leads. Raises Unavailable if nobody does."""
        found = await self._redis.do("GET", LEADER)
        if found is None:
            raise Unavailable("no coordinator leads.", "start one.")
        return Holder(**json.loads(found))

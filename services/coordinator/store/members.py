"""The fleet in Redis: members with their weights, and the epoch."""

import json
from collections.abc import Mapping
from typing import Any

from millrace.ids import Epoch, MemberId
from services.coordinator.store.connection import Connection, text

MEMBERS = "millrace:fleet:members"
EPOCH = "millrace:fleet:epoch"


class Members:
    """The members of the fleet, each a JSON object."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection

    async def all(self) -> tuple[Epoch, dict[MemberId, dict[str, Any]]]:
        epoch, members = await self._redis.together(("GET", EPOCH), ("HGETALL", MEMBERS))
        return Epoch(int(epoch or 0)), {MemberId(text(i)): json.loads(m) for i, m in members.items()}

    async def put(self, member_id: MemberId, member: Mapping[str, Any]) -> None:
        await self._redis.do("HSET", MEMBERS, member_id, json.dumps(member))

    async def put_all(self, members: Mapping[MemberId, Mapping[str, Any]]) -> None:
        if members:
            fields = [part for i, member in members.items() for part in (i, json.dumps(member))]
            await self._redis.do("HSET", MEMBERS, *fields)

    async def join(self, member_id: MemberId, member: Mapping[str, Any]) -> Epoch:
        """Adds a member and raises the epoch."""
        put = ("HSET", MEMBERS, member_id, json.dumps(member))
        return Epoch(int((await self._redis.together(put, ("INCR", EPOCH)))[1]))

    async def remove(self, member_id: MemberId) -> Epoch:
        """Removes a member and raises the epoch."""
        return Epoch(int((await self._redis.together(("HDEL", MEMBERS, member_id), ("INCR", EPOCH)))[1]))

    async def grow(self) -> Epoch:
        """Raises the epoch."""
        return Epoch(int(await self._redis.do("INCR", EPOCH)))

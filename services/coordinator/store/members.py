"""The fleet in Redis: members with their weights, the epoch, and the deaths that are charged to a job: those of
replicas by place, and of the trainer by step."""

import json
from collections.abc import Mapping
from typing import Any

from millrace.ids import Epoch, JobId, MemberId
from services.coordinator.state.faults import COUNT_S, Deaths
from services.coordinator.store.connection import Connection, text
from services.coordinator.store.jobs import key

MEMBERS = "millrace:fleet:members"
EPOCH = "millrace:fleet:epoch"


class Members:
    """The members of the fleet, each a JSON object."""

    def __init__(self, connection: Connection) -> None:
        self._redis = connection

    async def all(self) -> tuple[Epoch, dict[MemberId, dict[str, Any]]]:
        epoch, members = await self._redis.together(("GET", EPOCH), ("HGETALL", MEMBERS))
        return Epoch(int(epoch or 0)), {MemberId(text(i)): json.loads(m) for i, m in members.items()}

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


PARTS = ("deaths", "setbacks", "last_words")
"""The keys of one job's deaths."""


class DeathRecords:
    """The deaths of one job. The scripts that complete a group, train a step and start a job settle them."""

    def __init__(self, connection: Connection, job_id: JobId) -> None:
        self._redis = connection
        self._job = key(job_id)

    async def charge(self, place: str, token: str) -> int:
        """Charges a death of `place`; answers its deaths in a row. A repeated `token` charges nothing."""
        return int(await self._redis.run("charge", [f"{self._job}:deaths"], [place, token]))

    async def set_back(self, step: int, token: str) -> int:
        """Notes that the trainer was lost after `step` steps; answers how often that happened since the job first came
        so far. A repeated `token` notes nothing."""
        return int(await self._redis.run("set_back", [f"{self._job}:setbacks"], [step, token]))

    async def say(self, member: MemberId, words: str) -> None:
        """Keeps what a member said that died."""
        key = f"{self._job}:last_words"
        await self._redis.together(("HSET", key, "member", member, "words", words), ("EXPIRE", key, COUNT_S))

    async def guess(self, member: MemberId, why: str) -> None:
        """Notes who died last, before its words are known. `why`, as others saw its end, stands for them if no dead
        member has said anything yet."""
        key = f"{self._job}:last_words"
        died = ("HSET", key, "member", member)
        await self._redis.together(died, ("HSETNX", key, "words", why), ("EXPIRE", key, COUNT_S))

    async def last(self) -> str:
        """Id of the member that died last; empty if there is none."""
        return text(await self._redis.do("HGET", f"{self._job}:last_words", "member"))

    async def words(self) -> str:
        """What the last of the dead said; empty if that is not known."""
        return text(await self._redis.do("HGET", f"{self._job}:last_words", "words"))

    async def all(self) -> Deaths:
        found, words = await self._redis.together(
            ("HGETALL", f"{self._job}:deaths"), ("HGET", f"{self._job}:last_words", "words")
        )
        counts = {name.decode(): int(value) for name, value in found.items() if not name.startswith(b"token:")}
        return Deaths(counts, text(words))

"""Everything that the coordinator knows, in Redis. Only this folder talks to Redis.

All keys begin with `millrace:`. Transitions are the Lua scripts of `scripts/`: atomic, and safe to repeat.
"""

from millrace.ids import JobId, Purpose
from services.coordinator.store.connection import Connection, StoreDown, Superseded
from services.coordinator.store.index import JobIndex
from services.coordinator.store.jobs import Jobs
from services.coordinator.store.members import DeathRecords, Members
from services.coordinator.store.prompts import Prompts, Refusals
from services.coordinator.store.records import Records
from services.coordinator.store.users import AuditLog, Users

__all__ = [
    "Prompts",
    "Records",
    "Refusals",
    "Store",
    "StoreDown",
    "Superseded",
]

GENERATION = "millrace:coordinators"


class Store:
    """What one Redis holds, by subject."""

    def __init__(self, url: str) -> None:
        self.connection = Connection(url)
        self.jobs = Jobs(self.connection)
        self.index = JobIndex(self.connection)
        self.members = Members(self.connection)
        self.users = Users(self.connection)
        self.audit = AuditLog(self.connection)
        self._generation = 0

    def prompts(self, job_id: JobId, purpose: Purpose = Purpose.TRAIN) -> Prompts:
        return Prompts(self.connection, job_id, purpose)

    def deaths(self, job_id: JobId) -> DeathRecords:
        return DeathRecords(self.connection, job_id)

    def records(self, job_id: JobId) -> Records:
        return Records(self.connection, job_id)

    async def take_over(self) -> None:
        """Supersedes every other coordinator that works on this Redis. Completes the index of its jobs."""
        self._generation = int(await self.connection.do("INCR", GENERATION))
        await self.index.complete()

    async def still_ours(self) -> None:
        """Raises Superseded where another coordinator has taken over."""
        newest = int(await self.connection.do("GET", GENERATION) or 0)
        if newest != self._generation:
            what = f"another coordinator was started on Redis at {self.connection.name}."
            raise Superseded(what, "run one coordinator on one Redis.")

    async def close(self) -> None:
        await self.connection.close()

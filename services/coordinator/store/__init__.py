"""Everything that the coordinator knows, in Redis. Only this folder talks to Redis.

All keys begin with `millrace:`. Transitions are the Lua scripts of `scripts/`: atomic, and safe to repeat.
"""

from millrace.ids import JobId, Purpose
from services.coordinator.store.connection import Connection, StoreDown, Superseded
from services.coordinator.store.index import JobIndex
from services.coordinator.store.jobs import Jobs
from services.coordinator.store.leadership import Holder, Leadership
from services.coordinator.store.members import DeathRecords, Members
from services.coordinator.store.prompts import Prompts, Refusals
from services.coordinator.store.records import Records
from services.coordinator.store.users import AuditLog, Users

__all__ = [
    "Holder",
    "Prompts",
    "Records",
    "Refusals",
    "Store",
    "StoreDown",
    "Superseded",
]


class Store:
    """What one Redis holds, by subject."""

    def __init__(self, url: str) -> None:
        self.connection = Connection(url)
        self.jobs = Jobs(self.connection)
        self.index = JobIndex(self.connection)
        self.members = Members(self.connection)
        self.users = Users(self.connection)
        self.audit = AuditLog(self.connection)
        self.leadership = Leadership(self.connection)

    def prompts(self, job_id: JobId, purpose: Purpose = Purpose.TRAIN) -> Prompts:
        return Prompts(self.connection, job_id, purpose)

    def deaths(self, job_id: JobId) -> DeathRecords:
        return DeathRecords(self.connection, job_id)

    def records(self, job_id: JobId) -> Records:
        return Records(self.connection, job_id)

    async def lead(self, holder: Holder, lease_s: float, *, back: bool = False) -> Holder | None:
        """Takes the lease of the leading coordinator, as `Leadership.take`, and completes the index of jobs."""
        leader = await self.leadership.take(holder, lease_s, back=back)
        if leader is None:
            await self.index.complete()
        return leader

    async def close(self) -> None:
        await self.connection.close()

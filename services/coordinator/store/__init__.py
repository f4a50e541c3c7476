"""Everything that the coordinator knows, in Redis. No other module speaks to it.

Keys begin with `millrace:`. Transitions are the Lua scripts of `scripts/`: atomic, and safe to repeat.
"""

from millrace.ids import JobId
from services.coordinator.store.connection import Connection, StoreDown, Superseded
from services.coordinator.store.jobs import Jobs
from services.coordinator.store.members import Members
from services.coordinator.store.prompts import Claim, Draft, Prompts, Purpose, Refusals, purpose_of
from services.coordinator.store.records import Records

__all__ = [
    "Claim",
    "Draft",
    "Prompts",
    "Purpose",
    "Records",
    "Refusals",
    "Store",
    "StoreDown",
    "Superseded",
    "purpose_of",
]

GENERATION = "millrace:coordinators"


class Store:
    """One Redis, by what is in it."""

    def __init__(self, url: str) -> None:
        self.connection = Connection(url)
        self.jobs = Jobs(self.connection)
        self.members = Members(self.connection)
        self._generation = 0

    def prompts(self, job_id: JobId, purpose: Purpose = Purpose.TRAIN) -> Prompts:
        return Prompts(self.connection, job_id, purpose)

    def records(self, job_id: JobId) -> Records:
        return Records(self.connection, job_id)

    async def take_over(self) -> None:
        """From now on every other coordinator on this Redis is superseded."""
        self._generation = int(await self.connection.do("INCR", GENERATION))

    async def still_ours(self) -> None:
        """Raises Superseded."""
        newest = int(await self.connection.do("GET", GENERATION) or 0)
        if newest != self._generation:
            what = f"another coordinator was started on Redis at {self.connection.name}."
            raise Superseded(what, "run one coordinator on one Redis.")

    async def close(self) -> None:
        await self.connection.close()

"""Charges the deaths of members to the job whose work they held. What follows from that is in
`services/coordinator/state/faults.py`."""

from millrace import events
from millrace.ids import MemberId
from millrace.rest import MemberKind
from services.coordinator.fleet.partition import Partition
from services.coordinator.observe.events import Events
from services.coordinator.state.faults import PLACE_BUDGET
from services.coordinator.state.job import ACTIVE, JobRecord
from services.coordinator.state.member import Member
from services.coordinator.state.waiting import Turn
from services.coordinator.store import Store

MOST_SHOWN = 500
"""Characters of the last words in an event's message."""


class DeathWatch:
    """Hears of every member that is gone, and of the last words that its next life brings."""

    def __init__(self, store: Store, fleet: Partition, turn: Turn, events: Events) -> None:
        self._store = store
        self._turn = turn
        self._events = events
        fleet.on_gone(self.gone)
        fleet.on_last_words(self.add_last_words)

    async def gone(self, member: Member, why: str) -> None:
        """Charges the job that the member worked for, if it died."""
        job = self._turn.job
        if job is None or not member.died or not _works_for(job, member):
            return
        deaths = self._store.deaths(job.id)
        if member.last_words:
            await deaths.say(member.id, member.last_words)
        else:
            await deaths.guess(member.id, why)
        number, counted = None, ""
        if member.kind is MemberKind.ROLLOUT:
            number = await deaths.charge(member.place, member.id)
            counted = f", {number} of {PLACE_BUDGET} times in a row with no group completed in between"
        message = f"{member.id} died while it worked for the job{counted}: {(member.last_words or why)[:MOST_SHOWN]}"
        await self._events.add(job.id, events.MemberDied(member=member.id, deaths=number), message)

    async def add_last_words(self, member_id: MemberId, words: str) -> None:
        """Keeps the last words of a member that the job whose turn it is was charged with before they were known."""
        job = self._turn.job
        if job is not None and await self._store.deaths(job.id).last() == member_id:
            await self._store.deaths(job.id).say(member_id, words)
            event = events.MemberDied(member=member_id, deaths=None)
            await self._events.add(job.id, event, f"the last words of {member_id}: {words[:MOST_SHOWN]}")


def _works_for(job: JobRecord, member: Member) -> bool:
    """Whether the member holds the job's work: its model, its leases, or the preparations for them."""
    if member.kind is MemberKind.TRAINER:
        return job.state in ACTIVE
    return member.configuring or (member.configured is not None and member.configured.job_id == job.id)

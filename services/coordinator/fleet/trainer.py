"""The trainer that is in charge, for the job loop: one trainer, one call at a time."""

import asyncio

from millrace.contracts.method import Request, Response, Unary
from millrace.contracts.methods import TrainerRpc
from millrace.contracts.v1 import trainer_pb2
from millrace.errors import Fenced, Unavailable
from millrace.ids import JobId, Version
from services.coordinator.fleet.partition import Partition
from services.coordinator.state.member import Member

LAST_CALLS = {method.key for method in (TrainerRpc.GetStatus, TrainerRpc.Save, TrainerRpc.FinishSave)}
"""Calls that a trainer gets while it drains: a checkpoint of what it holds."""


class TrainerLost(Unavailable):
    """The trainer is gone, was replaced, or holds another version than the ledger says. The job loop starts again and
    finds out what the trainer holds."""


class TrainerLeft(TrainerLost):
    """The trainer was asked to leave: it drains, or has left. That is nobody's failure."""

    def __init__(self, member: Member) -> None:
        super().__init__(f"{member.id} was asked to leave.", "start another trainer.")
        self.member = member.id


class Trainer:
    """Calls the trainer that was in charge at the last `take`, and no other."""

    def __init__(self, fleet: Partition) -> None:
        self.turn = asyncio.Lock()
        """Held while the trainer steps, publishes, saves or loads, and until the ledger knows of it."""
        self._fleet = fleet
        self._taken: Member | None = None
        self._held: tuple[Member, JobId, Version] | None = None

    def take(self) -> None:
        """Chooses the trainer that is in charge now. Calls go to it alone, until `take` is called again. Raises
        TrainerLost if there is none."""
        self._taken = None
        self._taken = self.member
        self._taken.trains = True

    def release(self) -> None:
        """The job has ended: calls go to whichever trainer is in charge."""
        if self._taken is not None:
            self._taken.trains = False
        self._taken = self._held = None

    @property
    def holds(self) -> tuple[JobId, Version] | None:
        """Job and version that the trainer certainly holds. None while that is not known, as for a new trainer."""
        if self._held is None or self._held[0] is not self._fleet.trainer:
            return None
        return self._held[1:]

    @holds.setter
    def holds(self, held: tuple[JobId, Version] | None) -> None:
        self._held = (self._taken or self.member, *held) if held is not None else None

    @property
    def member(self) -> Member:
        """The trainer in charge. Raises TrainerLost if there is none, or another one than at the last `take`."""
        self.check_stays()
        member = self._fleet.trainer
        if member is None:
            raise TrainerLost("there is no trainer in the fleet.", "start one.")
        if self._taken is not None and member is not self._taken:
            raise TrainerLost(f"{member.id} is the trainer now, in place of {self._taken.id}.")
        return member

    def check(self, needed: bool) -> None:
        """Raises TrainerLeft if the trainer was asked to leave, TrainerLost if another one has taken over, or if it is
        gone and `needed`."""
        self.check_stays()
        if self._fleet.trainer is None and not needed:
            return
        member = self.member
        if self._held is None or self._held[0] is not member:
            raise TrainerLost("another trainer has taken over.")

    def check_stays(self) -> None:
        """Raises TrainerLeft if the trainer of the last `take` was asked to leave."""
        if self._taken is not None and self._taken.leaves:
            raise TrainerLeft(self._taken)

    async def call(self, method: Unary[Request, Response], request: Request) -> Response:
        """Calls the trainer. Raises TrainerLost if it cannot be reached or holds another job or version; TrainerLeft if
        it drains or has left: one that drains is only asked for what `LAST_CALLS` has."""
        drains = self._taken is not None and self._taken.draining and method.key in LAST_CALLS
        member = self._taken if self._taken is not None and drains else self.member
        try:
            return await self._fleet.call(member, method, request)
        except (Unavailable, Fenced) as error:
            self._held = None
            await self._fleet.suspect(member)
            if member.leaves:
                raise TrainerLeft(member) from error
            raise TrainerLost(error.what, error.fix) from error

    async def status(self) -> trainer_pb2.TrainerStatus:
        return await self.call(TrainerRpc.GetStatus, trainer_pb2.TrainerStatusRequest())

"""The trainer as the loop sees it: whoever holds the seat, one call at a time."""

import asyncio

from millrace.errors import Fenced, Unavailable
from millrace.ids import JobId, Version
from millrace.wire.method import Request, Response, Unary
from millrace.wire.methods import TrainerRpc
from millrace.wire.v1 import trainer_pb2
from services.coordinator.fleet.fleet import Fleet
from services.coordinator.state.member import Member


class TrainerLost(Unavailable):
    """The trainer is gone, or stands elsewhere than the ledger says: find out where it stands and go on from there."""


class Trainer:
    def __init__(self, fleet: Fleet) -> None:
        self.turn = asyncio.Lock()
        """Held while the trainer steps, publishes, saves or loads, and until the ledger knows of it."""
        self._fleet = fleet
        self._seated: Member | None = None
        self._held: tuple[Member, JobId, Version] | None = None

    def take(self) -> None:
        """From here on it is whoever holds the seat now: nobody else is asked until this is called again. Raises
        TrainerLost."""
        self._seated = None
        self._seated = self.member

    def release(self) -> None:
        self._seated = self._held = None

    @property
    def holds(self) -> tuple[JobId, Version] | None:
        """What it certainly holds: None while that is not known, as of one that has just come."""
        if self._held is None or self._held[0] is not self._fleet.trainer:
            return None
        return self._held[1:]

    @holds.setter
    def holds(self, held: tuple[JobId, Version] | None) -> None:
        self._held = (self._seated or self.member, *held) if held is not None else None

    @property
    def member(self) -> Member:
        """Raises TrainerLost where there is none, and where the seat is another's by now."""
        member = self._fleet.trainer
        if member is None:
            raise TrainerLost("there is no trainer in the fleet.", "start one.")
        if self._seated is not None and member is not self._seated:
            raise TrainerLost(f"{member.id} is the trainer now, in place of {self._seated.id}.")
        return member

    async def call(self, method: Unary[Request, Response], request: Request) -> Response:
        """Raises TrainerLost where it cannot be reached or refuses because it stands elsewhere."""
        member = self.member
        try:
            return await self._fleet.call(member, method, request)
        except (Unavailable, Fenced) as error:
            self.holds = None
            await self._fleet.suspect(member)
            raise TrainerLost(error.what, error.fix) from error

    async def status(self) -> trainer_pb2.TrainerStatus:
        return await self.call(TrainerRpc.GetStatus, trainer_pb2.TrainerStatusRequest())

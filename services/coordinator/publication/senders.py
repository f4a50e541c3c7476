"""Who sends in a publication: the trainer, or a replica that serves the version already and copies it to siblings."""

from typing import Any, Literal, Protocol

from millrace.errors import Unavailable
from millrace.wire.v1 import rollout_pb2_grpc
from services.coordinator.fleet.fleet import Fleet
from services.coordinator.fleet.trainer import Trainer
from services.coordinator.state.member import Member

COPY = {
    "DescribeWeights": "DescribeCopy",
    "PreparePublication": "PrepareCopy",
    "TransferPublication": "TransferCopy",
    "FinishPublication": "FinishCopy",
}
"""What a replica calls the trainer's methods."""


class Sender(Protocol):
    source: Literal["trainer", "sibling"]

    @property
    def id(self) -> str: ...

    async def ask(self, method: str, request: Any) -> Any:
        """`method` as the trainer has it. Raises MillraceError."""


class FromTrainer:
    """Raises TrainerLost where there is none."""

    source: Literal["trainer", "sibling"] = "trainer"

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def id(self) -> str:
        return self._trainer.member.id

    async def ask(self, method: str, request: Any) -> Any:
        return await self._trainer.call(method, request)


class FromSibling:
    source: Literal["trainer", "sibling"] = "sibling"

    def __init__(self, member: Member, fleet: Fleet) -> None:
        self._member = member
        self._fleet = fleet

    @property
    def id(self) -> str:
        return self._member.id

    async def ask(self, method: str, request: Any) -> Any:
        try:
            return await self._fleet.call(self._member, rollout_pb2_grpc.RolloutStub, COPY[method], request)
        except Unavailable:
            await self._fleet.suspect(self._member)
            raise

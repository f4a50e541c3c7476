"""Who sends in a publication: the trainer, or a replica that serves the version already and copies it to siblings."""

from dataclasses import dataclass
from typing import Literal, Protocol

from millrace.errors import Unavailable
from millrace.wire.method import Request, Response, Unary
from millrace.wire.methods import RolloutRpc, TrainerRpc
from millrace.wire.v1 import trainer_pb2
from services.coordinator.fleet.fleet import Fleet
from services.coordinator.fleet.trainer import Trainer
from services.coordinator.state.member import Member


@dataclass(frozen=True)
class SenderMethods:
    """The four methods of a sender, which trainers and replicas name differently."""

    describe: Unary[trainer_pb2.DescribeSendRequest, trainer_pb2.DescribeSendResponse]
    prepare: Unary[trainer_pb2.PrepareSendRequest, trainer_pb2.PrepareSendResponse]
    transfer: Unary[trainer_pb2.TransferSendRequest, trainer_pb2.TransferSendResponse]
    finish: Unary[trainer_pb2.FinishSendRequest, trainer_pb2.FinishSendResponse]


OF_TRAINER = SenderMethods(
    TrainerRpc.DescribeWeights,
    TrainerRpc.PreparePublication,
    TrainerRpc.TransferPublication,
    TrainerRpc.FinishPublication,
)
OF_REPLICA = SenderMethods(
    RolloutRpc.DescribeCopy, RolloutRpc.PrepareCopy, RolloutRpc.TransferCopy, RolloutRpc.FinishCopy
)


class Sender(Protocol):
    source: Literal["trainer", "sibling"]
    methods: SenderMethods

    @property
    def id(self) -> str: ...

    async def ask(self, method: Unary[Request, Response], request: Request) -> Response:
        """Calls `method`, one of `methods`. Raises MillraceError."""
        ...


class FromTrainer:
    """Raises TrainerLost where there is none."""

    source: Literal["trainer", "sibling"] = "trainer"
    methods = OF_TRAINER

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def id(self) -> str:
        return self._trainer.member.id

    async def ask(self, method: Unary[Request, Response], request: Request) -> Response:
        return await self._trainer.call(method, request)


class FromSibling:
    source: Literal["trainer", "sibling"] = "sibling"
    methods = OF_REPLICA

    def __init__(self, member: Member, fleet: Fleet) -> None:
        self._member = member
        self._fleet = fleet

    @property
    def id(self) -> str:
        return self._member.id

    async def ask(self, method: Unary[Request, Response], request: Request) -> Response:
        try:
            return await self._fleet.call(self._member, method, request)
        except Unavailable:
            await self._fleet.suspect(self._member)
            raise

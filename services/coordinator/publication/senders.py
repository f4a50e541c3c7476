"""Who sends in a publication: the trainer, or a replica that serves the version and copies it to its siblings."""

from dataclasses import dataclass
from typing import Protocol

from millrace.contracts.method import Request, Response, Unary
from millrace.contracts.methods import RolloutRpc, TrainerRpc
from millrace.contracts.v1 import trainer_pb2
from millrace.errors import Unavailable
from millrace.events import Source
from services.coordinator.fleet.partition import Partition
from services.coordinator.fleet.trainer import Trainer
from services.coordinator.state.member import Member


@dataclass(frozen=True)
class SenderMethods:
    """The four methods of a sender, which trainers and replicas name differently."""

    describe: Unary[trainer_pb2.DescribeSendRequest, trainer_pb2.DescribeSendResponse]
    prepare: Unary[trainer_pb2.PrepareSendRequest, trainer_pb2.PrepareSendResponse]
    transfer: Unary[trainer_pb2.TransferSendRequest, trainer_pb2.TransferSendResponse]
    finish: Unary[trainer_pb2.FinishSendRequest, trainer_pb2.FinishSendResponse]


TRAINER_METHODS = SenderMethods(
    TrainerRpc.DescribeWeights,
    TrainerRpc.PreparePublication,
    TrainerRpc.TransferPublication,
    TrainerRpc.FinishPublication,
)
REPLICA_METHODS = SenderMethods(
    RolloutRpc.DescribeCopy, RolloutRpc.PrepareCopy, RolloutRpc.TransferCopy, RolloutRpc.FinishCopy
)


class Sender(Protocol):
    """The member that sends, as an attempt uses it."""

    source: Source
    methods: SenderMethods
    can_gather: bool
    """Whether it can gather and broadcast. A replica cannot: its workers hold only what its engine needs."""
    is_copy: bool
    """Whether this is a copy that must not hold up anything: a newer publication ends it, and after a failure its end
    is not waited for."""

    @property
    def id(self) -> str:
        """The sending member's id."""
        ...

    async def ask(self, method: Unary[Request, Response], request: Request) -> Response:
        """Calls `method`, one of `methods`. Raises MillraceError."""
        ...


class TrainerSender:
    """The trainer. Its id and every call raise TrainerLost if there is none."""

    source: Source = "trainer"
    methods = TRAINER_METHODS
    can_gather = True
    is_copy = False

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def id(self) -> str:
        return self._trainer.member.id

    async def ask(self, method: Unary[Request, Response], request: Request) -> Response:
        return await self._trainer.call(method, request)


class SiblingSender:
    """A replica that serves the version."""

    source: Source = "sibling"
    methods = REPLICA_METHODS
    can_gather = False
    is_copy = True

    def __init__(self, member: Member, fleet: Partition) -> None:
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

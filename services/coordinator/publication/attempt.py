"""One attempt at a publication: who sends (the trainer, or a replica that serves the version and copies it to its
siblings), who takes part, how far it is, and the calls to its members."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import structlog

from millrace import events
from millrace.contracts.method import Request, Response, Unary
from millrace.contracts.methods import RolloutRpc, TrainerRpc
from millrace.contracts.v1 import rollout_pb2, trainer_pb2, weights_pb2
from millrace.errors import InvalidJob, MillraceError, PublicationFailed, Unavailable
from millrace.events import Source
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import span
from millrace.weights.phases import PublicationId
from millrace.weights.plans.manifest import Content
from services.coordinator.fleet.partition import Partition, Trainer, TrainerLost
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


BRIEFLY_S = 0.5
"""How long `wait_briefly` waits for members that may hang."""


class BackgroundCalls:
    """Keeps references to its tasks until they are done, since the event loop does not."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, *calls: Coroutine[Any, Any, None]) -> list[asyncio.Task[None]]:
        """Starts `calls` as tasks; cancelling the caller does not cancel them."""
        tasks = [asyncio.create_task(call) for call in calls]
        for task in tasks:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return tasks

    async def wait_briefly(self, *calls: Coroutine[Any, Any, None]) -> None:
        """Starts `calls` and waits up to BRIEFLY_S for them; those that are not done by then go on."""
        if tasks := self.start(*calls):
            await asyncio.wait(tasks, timeout=BRIEFLY_S)


log = structlog.get_logger(__name__)
Result = TypeVar("Result")
STATUS_S = 1.5
"""A receiver that works answers GetStatus within this time."""


@dataclass
class Attempt:
    """The state of one attempt. Its calls name the member that fails as the culprit."""

    ref: weights_pb2.PublicationRef
    content: Content
    """What is sent."""
    receivers: list[Member]
    deadline: float
    """A time of the event loop's clock."""
    fleet: Partition
    sender: Sender
    background: BackgroundCalls
    whole: bool = True
    """Everything is sent, not only what changed: known after PREPARE."""
    phase: events.PublicationPhase = "prepare"
    prepared: bool = False
    """Whether the sender was asked to prepare, so that the end has to be sent to it."""
    unanswered: set[str] = field(default_factory=set)
    """Ids of the members that are being asked."""
    phase_seconds: dict[str, float] = field(default_factory=dict)
    cut: dict[str, tuple[events.PublicationPhase, str]] = field(default_factory=dict)
    """The receivers that failed after the transfer, by id: in which phase, and why."""
    refusals: dict[str, InvalidJob] = field(default_factory=dict)
    """The receivers that refused the job, because their engine has no place for its weights, by id."""

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 0.1."""
        return max(0.1, self.deadline - asyncio.get_running_loop().time())

    @property
    def sender_s(self) -> float:
        """The sender's limit in seconds: a little shorter, so that the sender fails first and can say why."""
        return self.left_s - min(1.0, 0.2 * self.left_s)

    def failure(self, phase: events.PublicationPhase, culprits: Sequence[str]) -> events.PublicationFailed:
        """This attempt's failure as the payload of an event."""
        return events.PublicationFailed(
            version=self.ref.version,
            epoch=self.ref.epoch,
            attempt=self.ref.attempt,
            source=self.sender.source,
            phase=phase,
            culprits=list(culprits),
        )

    def lost(self) -> tuple[str, ...]:
        """The ids of the receivers that are gone."""
        return tuple(m.id for m in self.receivers if m.gone.is_set())

    def culprits(self, error: PublicationFailed) -> list[Member]:
        """The receivers among the culprits that the error names."""
        return [m for m in self.receivers if m.id in error.culprits or m.address in error.culprits]

    async def timed(self, phase: events.PublicationPhase, work: Awaitable[Result]) -> Result:
        """The result of `work`, which is all of `phase`."""
        self.phase = phase
        started = time.monotonic()
        try:
            with span(SpanKind(phase), detail=self.content.name.lower()):
                return await work
        finally:
            self.phase_seconds[phase] = time.monotonic() - started

    async def ask_sender(self, method: Unary[Request, Response], request: Request) -> Response:
        """Calls the sender, whose refusal fails the publication. Raises PublicationFailed, TrainerLost."""
        sender = self.sender.id
        self.unanswered.add(sender)
        try:
            answer = await self.sender.ask(method, request)
        except MillraceError as error:
            self.unanswered.discard(sender)
            if isinstance(error, TrainerLost | PublicationFailed):
                raise
            raise PublicationFailed(f"{sender} failed in {method.name}: {error.what}", error.fix) from error
        self.unanswered.discard(sender)
        return answer

    async def _ask(self, member: Member, method: Unary[Request, Response], request: Request) -> Response:
        self.unanswered.add(member.id)
        answer = await self.fleet.call(member, method, request)
        self.unanswered.discard(member.id)
        return answer

    async def ask_all(
        self,
        method: Unary[Request, Response],
        request: Callable[[Member], Request],
        members: Sequence[Member] | None = None,
    ) -> dict[str, Response]:
        """Calls every receiver, or `members`, at once; answers by member id. Raises PublicationFailed, with the member
        as the culprit, as soon as one fails."""
        asked = self.receivers if members is None else members
        if not asked:
            return {}
        tasks = {asyncio.create_task(self._ask(m, method, request(m))): m for m in asked}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failed = {tasks[task].id: error for task in done if (error := task.exception()) is not None}
            for error in failed.values():
                if not isinstance(error, MillraceError):
                    raise error
            self.refusals |= {member: error for member, error in failed.items() if isinstance(error, InvalidJob)}
            if failed:
                what = "; ".join(f"{member} failed in {method.name}: {error}" for member, error in failed.items())
                raise PublicationFailed(what, "look at its log.", tuple(failed))
            return {tasks[task].id: task.result() for task in done}
        finally:
            for task in tasks:
                task.cancel()

    async def ask_remaining(
        self,
        method: Unary[Request, Response],
        request: Request,
        limit_s: float,
        members: Sequence[Member] | None = None,
    ) -> dict[str, Response]:
        """Calls every receiver that has not been cut, or `members`, at once; answers by member id. Receivers that fail
        or are late are cut, and the others go on."""
        asked = [m for m in self.receivers if m.id not in self.cut] if members is None else members
        tasks = {m.id: asyncio.create_task(self._ask(m, method, request)) for m in asked}
        if not tasks:
            return {}
        try:
            _, late = await asyncio.wait(tasks.values(), timeout=limit_s)
        finally:
            for task in tasks.values():
                task.cancel()
        answers: dict[str, Response] = {}
        for member, task in tasks.items():
            if task.cancelled() and task not in late:
                self.cut[member] = self.phase, f"{method.name}: its connection was closed"
            elif task in late:
                self.cut[member] = self.phase, f"{method.name}: it did not answer within {limit_s:.1f} s"
            elif isinstance(error := task.exception(), MillraceError):
                self.cut[member] = self.phase, f"{method.name}: {error}"
                if isinstance(error, InvalidJob):
                    self.refusals[member] = error
            else:
                answers[member] = task.result()
        return answers

    async def suspects(self) -> tuple[str, ...]:
        """Receivers that do not answer GetStatus, or answer that they failed: the culprits if the sender could not
        name them."""
        answers = await asyncio.gather(*map(self._works, self.receivers))
        return tuple(m.id for m, works in zip(self.receivers, answers, strict=True) if not works)

    async def _works(self, member: Member) -> bool:
        try:
            async with asyncio.timeout(STATUS_S):
                status = await self.fleet.call(member, RolloutRpc.GetStatus, rollout_pb2.RolloutStatusRequest())
        except (MillraceError, TimeoutError):
            return False
        return status.state != rollout_pb2.ENGINE_STATE_FAILED

    async def finish(self, failure: str) -> None:
        """Tells the sender that the attempt is over, if it was asked to prepare; `failure` is empty after success.
        Raises TrainerLost."""
        if self.prepared:
            request = trainer_pb2.FinishSendRequest(publication=self.ref, failure=failure)
            try:
                await self.sender.ask(self.sender.methods.finish, request)
            except TrainerLost:
                raise
            except MillraceError as error:
                log.warning("the sender could not finish", sender=self.sender.id, error=str(error), **self._log_fields)

    async def abort(self, members: Sequence[Member], reason: str) -> None:
        """Tells `members` to forget the publication. A member that does not answer is not waited for: it finds out by
        the deadline, or with the next publication."""
        await self.background.wait_briefly(*(self._abort(m, reason) for m in members if not m.gone.is_set()))

    async def _abort(self, member: Member, reason: str) -> None:
        request = rollout_pb2.AbortReceiveRequest(publication=self.ref, reason=reason)
        try:
            await self.fleet.call(member, RolloutRpc.AbortPublication, request)
        except MillraceError as error:
            log.warning("could not abort", member=member.id, error=str(error), **self._log_fields)

    @property
    def _log_fields(self) -> dict[str, str]:
        return {"publication": PublicationId.from_proto(self.ref).key, "source": self.sender.source}

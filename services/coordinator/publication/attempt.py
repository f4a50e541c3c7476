"""One try at a publication: who takes part, how far it came, and asking everybody."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog

from millrace import events
from millrace.errors import MillraceError, PublicationFailed
from millrace.wire.method import Request, Response, Unary
from millrace.wire.methods import RolloutRpc
from millrace.wire.v1 import rollout_pb2, trainer_pb2, weights_pb2
from services.coordinator.fleet.fleet import Fleet
from services.coordinator.fleet.trainer import TrainerLost
from services.coordinator.publication.senders import Sender
from services.coordinator.state.member import Member

log = structlog.get_logger(__name__)
Answer = TypeVar("Answer")
WELL_S = 1.5
"""A receiver that lives says within this how it is."""
MOMENT_S = 0.5
"""How long members that may hang are waited for after a failure."""


@dataclass
class Attempt:
    ref: weights_pb2.PublicationRef
    receivers: list[Member]
    deadline: float
    """Of the event loop's clock."""
    fleet: Fleet
    sender: Sender
    phase: events.PublicationPhase = "prepare"
    prepared: bool = False
    """The sender was asked to prepare, so it has to be told the end."""
    unanswered: set[str] = field(default_factory=set)
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds."""
    cut: dict[str, tuple[events.PublicationPhase, str]] = field(default_factory=dict)
    """The receivers that failed after the transfer, by id: in which phase, and why."""
    loose: set[asyncio.Task[None]] = field(default_factory=set)
    """Calls that nobody waits for."""

    @property
    def left_s(self) -> float:
        return max(0.1, self.deadline - asyncio.get_running_loop().time())

    @property
    def sender_s(self) -> float:
        """For the sender, which gives up a little earlier, so that it can say why."""
        return self.left_s - min(1.0, 0.2 * self.left_s)

    @property
    def named(self) -> dict[str, Any]:
        ref = self.ref
        return {"version": ref.version, "epoch": ref.epoch, "attempt": ref.attempt, "source": self.sender.source}

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

    def culprits(self, error: PublicationFailed) -> list[Member]:
        """The receivers among those that the error blames."""
        return [m for m in self.receivers if m.id in error.culprits or m.address in error.culprits]

    async def timed(self, phase: events.PublicationPhase, work: Awaitable[Answer]) -> Answer:
        self.phase = phase
        started = time.monotonic()
        try:
            return await work
        finally:
            self.phases[phase] = time.monotonic() - started

    async def ask_sender(self, method: Unary[Request, Response], request: Request) -> Response:
        """A refusal of the sender fails the publication. Raises PublicationFailed, TrainerLost."""
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

    async def ask(self, member: Member, method: Unary[Request, Response], request: Request) -> Response:
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
        """Every receiver, or those named, at once. Raises PublicationFailed as soon as one fails, who is the
        culprit."""
        asked = self.receivers if members is None else members
        if not asked:
            return {}
        tasks = {asyncio.create_task(self.ask(m, method, request(m))): m for m in asked}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failed = {tasks[task].id: error for task in done if (error := task.exception()) is not None}
            for error in failed.values():
                if not isinstance(error, MillraceError):
                    raise error
            if failed:
                what = "; ".join(f"{member} failed in {method.name}: {error}" for member, error in failed.items())
                raise PublicationFailed(what, "look at its log.", tuple(failed))
            return {tasks[task].id: task.result() for task in done}
        finally:
            for task in tasks:
                task.cancel()

    async def ask_rest(self, method: Unary[Request, Response], request: Request, limit_s: float) -> dict[str, Response]:
        """Every receiver that has not failed yet, at once. Those that fail or are late are cut; the others go on."""
        members = [m for m in self.receivers if m.id not in self.cut]
        answers = await asyncio.gather(*(self._ask_one(m, method, request, limit_s) for m in members))
        return {m.id: answer for m, answer in zip(members, answers, strict=True) if answer is not None}

    async def _ask_one(
        self, member: Member, method: Unary[Request, Response], request: Request, limit_s: float
    ) -> Response | None:
        """None where the member was cut."""
        try:
            async with asyncio.timeout(limit_s):
                return await self.ask(member, method, request)
        except TimeoutError:
            self.cut[member.id] = self.phase, f"{method.name}: it did not answer within {limit_s:.1f} s"
        except MillraceError as error:
            self.cut[member.id] = self.phase, f"{method.name}: {error}"
        return None

    async def suspects(self) -> tuple[str, ...]:
        """Receivers that cannot say how they are, or say that they failed: for a sender that could not tell who."""
        answers = await asyncio.gather(*map(self._is_well, self.receivers))
        return tuple(m.id for m, well in zip(self.receivers, answers, strict=True) if not well)

    async def _is_well(self, member: Member) -> bool:
        try:
            async with asyncio.timeout(WELL_S):
                status = await self.fleet.call(member, RolloutRpc.GetStatus, rollout_pb2.RolloutStatusRequest())
        except (MillraceError, TimeoutError):
            return False
        return status.state != rollout_pb2.ENGINE_STATE_FAILED

    async def abort(self, members: Sequence[Member], reason: str) -> None:
        """Lets `members` forget the publication. Nobody waits long for one that does not answer: it finds out by the
        deadline, or with the next publication."""
        await self.briefly(*(self._abort(m, reason) for m in members if not m.gone.is_set()))

    async def finish(self, failure: str) -> None:
        """Tells the sender that it is over, if it has begun. Raises TrainerLost."""
        if self.prepared:
            request = trainer_pb2.FinishSendRequest(publication=self.ref, failure=failure)
            try:
                await self.sender.ask(self.sender.methods.finish, request)
            except TrainerLost:
                raise
            except MillraceError as error:
                log.warning("the sender could not finish", sender=self.sender.id, error=str(error), **self.named)

    def let_go(self, *calls: Coroutine[Any, Any, None]) -> list[asyncio.Task[None]]:
        """Begins calls that go on by themselves, whoever waits."""
        tasks = [asyncio.create_task(call) for call in calls]
        for task in tasks:
            self.loose.add(task)
            task.add_done_callback(self.loose.discard)
        return tasks

    async def briefly(self, *calls: Coroutine[Any, Any, None]) -> None:
        """Waits a moment for `calls`; what is not done then goes on by itself."""
        if tasks := self.let_go(*calls):
            await asyncio.wait(tasks, timeout=MOMENT_S)

    async def _abort(self, member: Member, reason: str) -> None:
        request = rollout_pb2.AbortReceiveRequest(publication=self.ref, reason=reason)
        try:
            await self.fleet.call(member, RolloutRpc.AbortPublication, request)
        except MillraceError as error:
            log.warning("could not abort", member=member.id, error=str(error), **self.named)

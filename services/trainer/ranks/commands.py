"""Commands from rank 0 to every rank, and their answers.

A command is a call of the trainer's own service: its request, packed as protobuf and numbered, in a store that rank 0
serves. The main thread of each rank takes commands in order and answers each with a reply or a failure. The control
thread of rank 0 waits for all answers. Every rank also writes heartbeats to that store, so that a rank that dies or
hangs is named soon, even while the others wait for it.
"""

import asyncio
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import structlog
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message

from millrace.contracts.method import Unary
from millrace.errors import MillraceError, OutOfMemory, Unavailable
from services.trainer.ranks.collectives import Answer, Crash, decode_answer, encode_answer
from services.trainer.ranks.heartbeats import Heartbeats
from services.trainer.ranks.world import World

log = structlog.get_logger(__name__)

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
Result = TypeVar("Result")

POLL_S = 1.0
STRAGGLE_S = 3.0
"""How long the other ranks have to answer after one rank failed, beyond the time after which a silent rank counts as
dead: they may be blocked, waiting for that rank."""
STOP = Empty()


class RanksFailed(Unavailable):
    """Ranks died, hang or crashed: the trainer cannot continue and has to be started again."""

    cause: OutOfMemory | None = None
    """Set if a rank ran out of memory: the caller gets this error."""


class ControlThread:
    """The thread with the event loop of a rank: servers and remote calls run there, and no torch work."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="control", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[None, None, Result]) -> Result:
        """Runs the coroutine on the loop and waits for its result. Every coroutine given here has its own deadlines."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def stop(self) -> None:
        """Ends the loop and its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


@dataclass(frozen=True)
class Handler:
    """What a rank does for one kind of command."""

    name: str
    request_type: str
    """Full protobuf name of the request."""
    run: Callable[[Packed], Message]

    @classmethod
    def of(cls, method: Unary[Request, Response], function: Callable[[Request], Response]) -> "Handler":
        def run(packed: Packed) -> Message:
            request = method.request()
            packed.Unpack(request)
            return function(request)

        return cls(method.name, method.request.DESCRIPTOR.full_name, run)


class CommandLoop:
    """The main thread of a rank: runs the handler of each command until the command to stop."""

    def __init__(self, world: World, handlers: Iterable[Handler]) -> None:
        self._world = world
        self._store = world.connect(timeout_s=30.0)
        self._handlers = {handler.request_type: handler for handler in handlers}

    def run(self) -> None:
        """Returns after the command to stop. Raises DistError if rank 0 cannot be reached."""
        number = 0
        while True:
            command = self._next(number)
            if command.Is(STOP.DESCRIPTOR):
                return
            answer = self._run(self._handlers[command.TypeName()], command)
            self._store.set(f"answer/{number}/{self._world.rank}", encode_answer(answer))
            number += 1

    def _next(self, number: int) -> Packed:
        key = f"command/{number}"
        while not self._store.wait([key], 10 * POLL_S):
            pass
        command = Packed()
        command.ParseFromString(self._store.get(key))
        return command

    def _run(self, handler: Handler, command: Packed) -> Message | MillraceError | Crash:
        try:
            return handler.run(command)
        except MillraceError as error:
            return error
        except Exception as error:  # the outermost loop of the process: rank 0 hears of it and ends the trainer
            log.exception("command failed", command=handler.name, rank=self._world.rank)
            where = traceback.extract_tb(error.__traceback__)[-1]
            return Crash(f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})")


class CommandSender:
    """Rank 0's side. Used from one thread at a time; each call blocks."""

    def __init__(self, world: World, heartbeats: Heartbeats) -> None:
        self._world = world
        self._store = world.connect(timeout_s=30.0)
        self._heartbeats = heartbeats
        self._number = 0

    def call(self, method: Unary[Request, Response], request: Request, deadline_s: float) -> Response:
        """Sends the command to every rank and returns rank 0's response once every rank has answered.

        Raises the MillraceError of the first rank that raised one; RanksFailed if a rank crashed or does not answer,
        or if one of several ran out of memory: the others may wait for it for ever.
        """
        number = self._number
        self._number += 1
        command = Packed()
        command.Pack(request)
        self._store.set(f"command/{number}", command.SerializeToString())
        answers = self._answers(number, method.name, deadline_s)
        self._store.delete(f"command/{number}")
        if crashes := {rank: answer.text for rank, answer in answers.items() if isinstance(answer, Crash)}:
            raise RanksFailed(f"{method.name} failed: {self._by_rank(crashes)}.", _FIX)
        for _, answer in sorted(answers.items()):
            if isinstance(answer, MillraceError):
                raise answer
        reply, response = answers[0], method.response()
        assert isinstance(reply, Packed)
        reply.Unpack(response)
        return response

    def stop(self) -> None:
        """Tells every rank to end its loop."""
        command = Packed()
        command.Pack(STOP)
        self._store.set(f"command/{self._number}", command.SerializeToString())

    def _answers(self, number: int, name: str, deadline_s: float) -> dict[int, Answer]:
        """The answer of every rank."""
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + deadline_s
        late = f"did not finish within {deadline_s:g} s, which the job's deadlines give to {name}"
        while missing := [rank for rank in range(self._world.size) if rank not in answers]:
            keys = {f"answer/{number}/{rank}": rank for rank in missing}
            self._store.wait(list(keys), POLL_S)
            answers |= {keys[key]: decode_answer(data) for key, data in self._store.take(list(keys)).items()}
            if self._world.size > 1:
                self._check_memory(name, answers)
            if not all(isinstance(answer, Packed) for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + self._heartbeats.silent_s + STRAGGLE_S)
                late = "did not finish in time"
            self._check(name, answers, late if time.monotonic() > deadline else "")
        return answers

    def _check_memory(self, name: str, answers: Mapping[int, Answer]) -> None:
        """Raises RanksFailed for the first rank that ran out of memory."""
        for _, answer in sorted(answers.items()):
            if isinstance(answer, OutOfMemory):
                failed = RanksFailed(f"{name} failed: {answer.what}", _FIX)
                failed.cause = answer
                raise failed

    def _check(self, name: str, answers: Mapping[int, Answer], late: str) -> None:
        """Raises RanksFailed, with every failed rank named, if an answer will not come any more. `late`: what is said
        of ranks that have not answered when the deadline has passed; empty before."""
        missing = [rank for rank in range(self._world.size) if rank not in answers]
        silent = {rank: f"silent for {s:.0f} s, dead or stopped" for rank, s in self._heartbeats.silent().items()}
        lost = {rank: why for rank, why in silent.items() if rank in missing}
        if missing and late and not lost:
            lost = dict.fromkeys(missing, late)
        if lost:
            failed = {rank: _first_line(a) for rank, a in answers.items() if not isinstance(a, Packed)}
            raise RanksFailed(f"{name} failed: {self._by_rank(lost | failed)}.", _FIX)

    def _by_rank(self, reasons: Mapping[int, str]) -> str:
        host = self._heartbeats.host
        return "; ".join(f"rank {rank} on {host(rank)}: {why}" for rank, why in sorted(reasons.items()))


_FIX = "the trainer ends and has to be started again; its job continues from the last checkpoint."


def _first_line(failure: MillraceError | Crash) -> str:
    text = failure.text if isinstance(failure, Crash) else failure.what
    return text.splitlines()[0]

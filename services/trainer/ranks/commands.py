"""How rank 0 tells every rank what to do, and hears how it went.

Commands are the trainer's own requests, packed as protobuf, numbered, in a store that rank 0 serves. Each rank's main
thread takes them in order and answers with a reply or a failure; rank 0's control thread waits for all answers. Every
rank also writes heartbeats to that store, so that one that dies or hangs is named soon, even while the others wait.
"""

import json
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import structlog
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import BytesValue
from torch.distributed import DistStoreError

from millrace.errors import MillraceError, Unavailable
from services.trainer.ranks import collectives
from services.trainer.ranks.heartbeats import Heartbeats
from services.trainer.ranks.world import World

log = structlog.get_logger(__name__)

Reply = TypeVar("Reply", bound=Message)

POLL_S = 1.0
STRAGGLE_S = 18.0
"""After one rank failed, the others have so long to answer: they may be stuck waiting for it."""
STOP = Empty()


class RanksFailed(Unavailable):
    """Ranks died, hang or broke off: the trainer cannot go on and has to be started anew."""


class Follower:
    """A rank's main thread: does what the commands say until told to stop."""

    def __init__(self, world: World, actions: Mapping[type[Message], Callable[[Any], Message]]) -> None:
        self._world = world
        self._store: Any = world.connect(timeout_s=30.0)  # torch's stubs know no bytes
        self._actions = {kind.DESCRIPTOR.full_name: (kind, action) for kind, action in actions.items()}

    def run(self) -> None:
        """Raises DistError where rank 0 is gone."""
        number = 0
        while True:
            command = self._next(number)
            if command.Is(STOP.DESCRIPTOR):
                return
            answer = Packed()
            answer.Pack(self._do(command))
            self._store.set(f"answer/{number}/{self._world.rank}", answer.SerializeToString())
            number += 1

    def _next(self, number: int) -> Packed:
        key = f"command/{number}"
        while True:
            try:
                self._store.wait([key], timedelta(seconds=10 * POLL_S))
            except DistStoreError:
                continue
            command = Packed()
            command.ParseFromString(self._store.get(key))
            return command

    def _do(self, command: Packed) -> Message:
        kind, action = self._actions[command.TypeName()]
        request = kind()
        command.Unpack(request)
        try:
            return action(request)
        except MillraceError as error:
            return BytesValue(value=collectives.encode_error(error))
        except Exception as error:  # the outermost loop of the process: rank 0 hears of it and ends the trainer
            log.exception("command failed", command=kind.__name__, rank=self._world.rank)
            where = traceback.extract_tb(error.__traceback__)[-1]
            broken = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
            return BytesValue(value=json.dumps({"broken": broken}).encode())


class Caller:
    """Rank 0's side. Used from one thread at a time; each call blocks."""

    def __init__(self, world: World, heartbeats: Heartbeats) -> None:
        self._world = world
        self._store: Any = world.connect(timeout_s=30.0)
        self._heartbeats = heartbeats
        self._number = 0

    def call(self, request: Message, reply: Reply, deadline_s: float) -> Reply:
        """Rank 0's reply, read into `reply`, once every rank has answered. Raises the MillraceError of the first rank
        that raised one; RanksFailed where a rank broke off or does not answer."""
        number, name = self._number, type(request).__name__.removesuffix("Request")
        self._number += 1
        command = Packed()
        command.Pack(request)
        self._store.set(f"command/{number}", command.SerializeToString())
        answers = self._answers(number, name, time.monotonic() + deadline_s)
        self._store.delete_key(f"command/{number}")
        failures = {rank: json.loads(answer) for rank, answer in answers.items() if isinstance(answer, bytes)}
        if broken := {rank: f["broken"] for rank, f in failures.items() if "broken" in f}:
            raise RanksFailed(f"{name} failed: {self._named(broken)}.", _FIX)
        for rank in sorted(failures):
            answer = answers[rank]
            assert isinstance(answer, bytes)
            raise collectives.decode_error(answer)
        answer = answers[0]
        assert isinstance(answer, Packed)
        answer.Unpack(reply)
        return reply

    def stop(self) -> None:
        command = Packed()
        command.Pack(STOP)
        self._store.set(f"command/{self._number}", command.SerializeToString())

    def _answers(self, number: int, name: str, give_up: float) -> dict[int, Packed | bytes]:
        """By rank: its packed reply, or its failure as bytes."""
        answers: dict[int, Packed | bytes] = {}
        while missing := [rank for rank in range(self._world.size) if rank not in answers]:
            self._wait([f"answer/{number}/{rank}" for rank in missing])
            for rank in missing:
                key = f"answer/{number}/{rank}"
                if self._store.check([key]):
                    answers[rank] = _unpacked(self._store.get(key))
                    self._store.delete_key(key)
            if any(isinstance(answer, bytes) for answer in answers.values()):
                give_up = min(give_up, time.monotonic() + STRAGGLE_S)
            self._check(name, answers, give_up)
        return answers

    def _wait(self, keys: list[str]) -> None:
        try:
            self._store.wait(keys, timedelta(seconds=POLL_S))
        except DistStoreError:
            return

    def _check(self, name: str, answers: Mapping[int, Packed | bytes], give_up: float) -> None:
        """Raises RanksFailed, naming the culprits, where waiting on makes no sense."""
        missing = [rank for rank in range(self._world.size) if rank not in answers]
        silent = {rank: f"silent for {s:.0f} s, dead or stopped" for rank, s in self._heartbeats.silent().items()}
        lost = {rank: why for rank, why in silent.items() if rank in missing}
        if missing and time.monotonic() > give_up and not lost:
            lost = dict.fromkeys(missing, "did not finish in time")
        if lost:
            broken = {r: _first_line(a) for r, a in answers.items() if isinstance(a, bytes)}
            raise RanksFailed(f"{name} failed: {self._named(lost | broken)}.", _FIX)

    def _named(self, reasons: Mapping[int, str]) -> str:
        host = self._heartbeats.host
        return "; ".join(f"rank {rank} on {host(rank)}: {why}" for rank, why in sorted(reasons.items()))


_FIX = "the trainer ends and has to be started again; its job goes on from the last checkpoint."


def _unpacked(data: bytes) -> Packed | bytes:
    answer = Packed()
    answer.ParseFromString(data)
    failure = BytesValue()
    return failure.value if answer.Unpack(failure) else answer


def _first_line(failure: bytes) -> str:
    fields = json.loads(failure)
    return str(fields.get("broken") or fields.get("what")).splitlines()[0]

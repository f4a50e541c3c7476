"""Processes in which environments run: episodes, each with a session in one of them."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import structlog

from millrace.environments.registry import FIELD
from millrace.spec.environment import Environment
from millrace.spec.model import Reward
from services.rollout.environments.environment import Called, EnvironmentFailed, ProcessLost
from services.rollout.user_process.pool import START_TIMEOUT_S, ProcessPool
from services.rollout.user_process.process import Setup, UserProcess, WorkerDied


class EnvironmentProcess(UserProcess):
    """A process that answers several calls at once. After WorkerDied, or TimeoutError of a call, it is to be killed."""

    condemned = False
    """Whether it is about to be killed: a call blocked it, needed too much memory or left processes behind."""
    _reader: asyncio.Task[None] | None = None
    _death: WorkerDied | None = None
    _waiting: dict[int, "_Call"]

    async def ask(self, arguments: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to one call. Raises WorkerDied, and TimeoutError if the process answers no call at all for
        `timeout_s`: a call may wait for those of other episodes. One that is cancelled goes on in the process."""
        if self._reader is None:
            self._waiting, self._reader = {}, asyncio.create_task(self._read())
        if self._death is not None:
            raise self._death
        self._asked += 1
        number = self._asked
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(timeout_s) as limit:
            self._waiting[number] = _Call(answer, limit, timeout_s)
            try:
                await self.send({"id": number, **arguments})
                return await answer
            finally:
                del self._waiting[number]

    async def end(self) -> None:
        """Kills the process and waits until none of its descendants is left."""
        await super().end()
        if self._reader is not None:
            await asyncio.wait({self._reader})

    async def _read(self) -> None:
        """Passes answers on until the process ends."""
        try:
            while True:
                reply = await self.receive()
                for call in self._waiting.values():
                    call.go_on()
                answered = self._waiting.get(reply.get("id", 0))
                if answered is not None and not answered.answer.done():
                    answered.answer.set_result(reply)
        except WorkerDied as death:
            self._death = death
            for call in self._waiting.values():
                if not call.answer.done():
                    call.answer.set_exception(death)


@dataclass(frozen=True)
class _Call:
    """A call that is not answered."""

    answer: asyncio.Future[dict[str, Any]]
    limit: asyncio.Timeout
    timeout_s: float

    def go_on(self) -> None:
        """Begins its time anew: the process has answered another call."""
        if not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time() + self.timeout_s)


log = structlog.get_logger(__name__)
GRACE_S = 1.0
"""A process says itself which call takes longer than it may. One that says nothing for twice that time and this is
killed."""


@dataclass(frozen=True)
class EnvironmentSetup(Setup):
    """The first message to a process of an environment."""

    call_s: float
    """Seconds of one call of the user's class, and of a tool."""
    code: tuple[str, ...] = ()
    """Folders that it sees besides that of the class."""
    field: ClassVar[str] = FIELD
    worker: ClassVar[str] = "services.rollout.environments.worker"


class ProcessSession:
    """One episode in one process. Every method raises EnvironmentFailed."""

    def __init__(self, process: EnvironmentProcess, setup: EnvironmentSetup, number: int) -> None:
        self._process, self._setup, self._number = process, setup, number
        self.closed = False
        """Whether the environment was closed."""
        self.process_usable = True
        """Whether the process can run other episodes."""

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The first messages."""
        return list((await self._ask("reset", row=row))["messages"])

    async def step(self, message: Mapping[str, Any]) -> tuple[list[dict[str, Any]], float | None, bool]:
        """What follows a turn: messages, the reward of the turn, and whether the episode is over."""
        answer = await self._ask("step", message=message)
        return list(answer["messages"]), answer["reward"], answer["done"]

    async def call(self, name: str, arguments: Any) -> Called:
        """The answer of a tool."""
        answer = await self._ask("call", name=name, arguments=arguments)
        return Called(answer["content"], answer["failed"], answer["reward"], answer["done"])

    async def score(self) -> tuple[float | None, dict[str, Any]]:
        """The score at the end, with further values; None if the environment gives none."""
        answer = await self._ask("score")
        return answer["score"], answer["details"]

    async def close(self) -> None:
        """Ends the episode. A call that was given up is cancelled in the process."""
        self.closed = True
        await self._ask("close")

    async def _ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        limit_s = self._setup.call_s
        if not self._process.alive or self._process.condemned:
            raise ProcessLost(f"{op}: the process ended with another episode")
        try:
            reply = await self._process.ask({"op": op, "episode": self._number, **arguments}, 2 * limit_s + GRACE_S)
        except TimeoutError:
            reply = {"blocked": True}
        except WorkerDied as death:
            self.process_usable = False
            failure = ProcessLost if self._process.condemned else EnvironmentFailed
            raise failure(f"{op}: {death}") from death
        if reply.get("blocked") or reply.get("out_of_memory"):
            self.process_usable, self._process.condemned = False, True
            memory = f"killed: memory limit {self._setup.memory_mb} MB"
            raise EnvironmentFailed(f"{op}: {f'timeout after {limit_s:g} s' if reply.get('blocked') else memory}")
        if reply.get("spoiled"):
            self.process_usable, self._process.condemned = False, True
        if (failure_text := reply.get("failure")) is not None:
            raise EnvironmentFailed(f"{op}: {failure_text}")
        return reply


class EnvironmentPool(ProcessPool):
    """Processes that each have the environment's class loaded, and run some episodes at the same time each."""

    process = EnvironmentProcess

    def __init__(
        self,
        setup: EnvironmentSetup,
        size: int,
        start_timeout_s: float = START_TIMEOUT_S,
        episodes_per_process: int = 1,
    ) -> None:
        super().__init__(setup, size, start_timeout_s, episodes_per_process)
        self.most_episodes = size * episodes_per_process
        """Episodes that can run at the same time."""
        self._environment = setup
        self._numbers = itertools.count()
        self._closing: set[asyncio.Task[None]] = set()

    @classmethod
    def of_job(cls, environment: Environment, reward: Reward) -> Self:
        """A pool for the class that a job names, with the limits of its `reward`."""
        return cls.of_class(environment.name, environment, reward)

    @classmethod
    def of_class(cls, name: str, environment: Environment, reward: Reward, code: tuple[str, ...] = ()) -> Self:
        """A pool for the class `name`, which sees the folders `code` too."""
        required = reward.isolation == "required"
        limits = (reward.memory_mb, reward.network, required, environment.call_s)
        setup = EnvironmentSetup(name, environment.options, *limits, code)
        return cls(setup, environment.processes, episodes_per_process=environment.episodes_of_process)

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The environment's tools, as chat templates take them. Valid once the pool has started."""
        return list(next(iter(self._alive)).greeting["tools"])

    async def close(self) -> None:
        """Kills all processes and waits until they are gone. Calls in progress fail."""
        await super().close()
        await asyncio.gather(*self._closing, return_exceptions=True)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[ProcessSession]:
        """A place for one episode, as soon as one is free. A process that does not answer is killed, with all of its
        episodes. Raises Unavailable if the pool is closed or no process can be started any more."""
        process = await self._take()
        assert isinstance(process, EnvironmentProcess)
        session = ProcessSession(process, self._environment, next(self._numbers))
        try:
            yield session
            await session.close()
        finally:
            if session.closed or not session.process_usable or not process.alive:
                self._give_back(process, usable=session.process_usable)
            else:
                # The episode failed or was cancelled. Nobody waits until its environment has ended.
                closing = asyncio.create_task(self._end(session, process))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    async def _end(self, session: ProcessSession, process: EnvironmentProcess) -> None:
        try:
            await session.close()
        except EnvironmentFailed as error:
            log.info("an environment did not close", reason=str(error))
        finally:
            self._give_back(process, usable=session.process_usable)

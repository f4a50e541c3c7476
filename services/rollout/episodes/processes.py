"""Processes in which environments run, one episode at a time each."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from millrace.environments.registry import FIELD
from millrace.spec.environment import Environment
from millrace.spec.model import Reward
from services.rollout.episodes.environments import Called, EnvironmentFailed
from services.rollout.scoring.process import ScoringProcess, Setup, WorkerDied
from services.rollout.scoring.processes import START_TIMEOUT_S, ProcessPool

GRACE_S = 1.0
"""A tool that can be cancelled is cancelled this long before its process would be killed."""


@dataclass(frozen=True)
class EnvironmentSetup(Setup):
    """The first message to a process of an environment."""

    call_s: float
    """Seconds of one call of the user's class, and of a tool."""
    code: tuple[str, ...] = ()
    """Folders that it sees besides that of the class."""
    field: ClassVar[str] = FIELD
    worker: ClassVar[str] = "services.rollout.episodes.worker"


class ProcessSession:
    """One episode in one process. Every method raises EnvironmentFailed."""

    def __init__(self, process: ScoringProcess, setup: EnvironmentSetup) -> None:
        self._process, self._setup = process, setup
        self.usable = True
        """Whether the process can run another episode."""

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The first messages."""
        return list((await self._ask("reset", row=row))["messages"])

    async def step(self, message: Mapping[str, Any]) -> tuple[list[dict[str, Any]], float | None, bool]:
        """What follows a turn: messages, the reward of the turn, and whether the episode is over."""
        told = await self._ask("step", message=message)
        return list(told["messages"]), told["reward"], told["done"]

    async def call(self, name: str, arguments: Any) -> Called:
        """The answer of a tool."""
        told = await self._ask("call", name=name, arguments=arguments)
        return Called(told["content"], told["failed"], told["reward"], told["done"])

    async def score(self) -> tuple[float | None, dict[str, Any]]:
        """The score at the end, with further values; None where the environment gives none."""
        told = await self._ask("score")
        return told["score"], told["details"]

    async def close(self) -> None:
        """Ends the episode."""
        await self._ask("close")

    async def _ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        limit_s, usable, self.usable = self._setup.call_s, self.usable, False
        try:
            reply = await self._process.ask({"op": op, **arguments}, limit_s + GRACE_S)
        except TimeoutError as error:
            raise EnvironmentFailed(f"{op}: timeout after {limit_s:g} s") from error
        except WorkerDied as death:
            raise EnvironmentFailed(f"{op}: {death}") from death
        if reply.get("out_of_memory"):
            raise EnvironmentFailed(f"{op}: killed: memory limit {self._setup.memory_mb} MB")
        self.usable = usable and not reply.get("spoiled")
        if (failure := reply.get("failure")) is not None:
            raise EnvironmentFailed(f"{op}: {failure}")
        return reply


class EnvironmentPool(ProcessPool):
    """Processes that each have the environment's class loaded. As many episodes run at once as there are processes."""

    def __init__(self, setup: EnvironmentSetup, size: int, start_timeout_s: float = START_TIMEOUT_S) -> None:
        super().__init__(setup, size, start_timeout_s)
        self._environment = setup

    @classmethod
    def of_job(cls, environment: Environment, reward: Reward) -> Self:
        """A pool for the class that a job names, with the limits of its `reward`."""
        return cls.of_class(environment.name, environment, reward)

    @classmethod
    def of_class(cls, name: str, environment: Environment, reward: Reward, code: tuple[str, ...] = ()) -> Self:
        """A pool for the class `name`, which sees the folders `code` too."""
        required = reward.isolation == "required"
        limits = (reward.memory_mb, reward.network, required, environment.call_s)
        return cls(EnvironmentSetup(name, environment.options, *limits, code), environment.processes)

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The environment's tools, as chat templates take them. Valid once the pool has started."""
        return list(next(iter(self._alive)).greeting["tools"])

    @asynccontextmanager
    async def session(self) -> AsyncIterator[ProcessSession]:
        """A process for one episode, as soon as one is free. A process that did not answer, or whose call was
        cancelled, is killed. Raises Unavailable where the pool is closed or no process can be started any more."""
        process = await self._take()
        session = ProcessSession(process, self._environment)
        try:
            yield session
            await session.close()
        finally:
            self._give_back(process, usable=session.usable)

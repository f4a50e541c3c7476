"""What the episodes of a job need of an environment, whatever it is: a class in processes, a server, tools alone."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

Message = dict[str, Any]


class EnvironmentFailed(Exception):
    """The episode cannot go on: `step: raised ValueError: ...`, `call: timeout after 30 s`, `killed: SIGSEGV`."""


class ProcessLost(EnvironmentFailed):
    """The episode cannot go on, because its process ended when another episode hung or crashed in it."""


@dataclass(frozen=True)
class Called:
    """What a tool answered."""

    content: str
    failed: bool = False
    reward: float | None = None
    """What the turn has earned with the call; None: nothing is known."""
    done: bool = False
    """Whether the episode is over."""


class Session(Protocol):
    """An environment in one episode. Every method raises EnvironmentFailed."""

    async def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """The first messages."""

    async def step(self, message: Mapping[str, Any]) -> tuple[list[Message], float | None, bool]:
        """What follows a turn without calls: messages, the reward of the turn, and whether the episode is over."""

    async def call(self, name: str, arguments: Any) -> Called:
        """The answer of a tool."""

    async def score(self) -> tuple[float | None, dict[str, Any]]:
        """The score at the end, with further values; None if the environment gives none."""


class Environments(Protocol):
    """The environment of a job: it gives a session to each episode. Use it between `start` and `close`."""

    async def start(self) -> None:
        """Makes it ready. Raises InvalidJob if it cannot be used, Unavailable if it cannot be reached."""

    async def close(self) -> None:
        """Ends it. Sessions in progress fail."""

    @property
    def most_episodes(self) -> int:
        """Episodes that can run at the same time."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The environment's tools, as chat templates take them. Valid once it has started."""

    def session(self) -> AbstractAsyncContextManager[Session]:
        """A session for one episode, as soon as there is room for one. Entering and leaving raise EnvironmentFailed,
        and Unavailable if no episode can be run any more."""


class ToolsAlone:
    """An environment that says nothing: the policy calls tools that others add until it answers, and the answer is
    scored by the reward function."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, at_once: int) -> None:
        """`at_once`: episodes that run at the same time."""
        self.most_episodes = at_once
        self._room = asyncio.Semaphore(at_once)

    async def start(self) -> None:
        """There is nothing to start."""

    async def close(self) -> None:
        """There is nothing to end."""

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        async with self._room:
            yield _Answers()


class _Answers:
    async def reset(self, row: Mapping[str, Any]) -> list[Message]:
        return messages_of(row)

    async def step(self, message: Mapping[str, Any]) -> tuple[list[Message], float | None, bool]:
        return [], None, True

    async def call(self, name: str, arguments: Any) -> Called:
        return Called(f"Error: there is no tool {name}.", failed=True)

    async def score(self) -> tuple[float | None, dict[str, Any]]:
        return None, {}


def messages_of(row: Mapping[str, Any]) -> list[Message]:
    """The prompt of a row as messages."""
    prompt = row["prompt"]
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(each) for each in prompt]

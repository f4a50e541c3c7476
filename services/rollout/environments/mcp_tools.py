"""An environment with the tools of MCP servers beside its own."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self

from mcp.types import Tool

from millrace.errors import Unavailable, refused
from millrace.sandbox.command import Limits
from millrace.spec.environment import Environment, McpServer
from millrace.spec.model import Reward
from services.rollout.environments.environment import Called, EnvironmentFailed, Environments, Message, Session
from services.rollout.environments.mcp_connection import Connection, Unreachable, connected, named
from services.rollout.user_process.process import hidden_paths, more_paths

FIELD = "rollout.environment.mcp"


class WithServers:
    """An environment, and the tools of servers."""

    def __init__(self, itself: Environments, servers: Sequence[McpServer], limits: Limits, call_s: float) -> None:
        """`limits` are those of servers that are commands, `call_s` the seconds that a call may take."""
        self._itself, self._servers, self._limits, self._call_s = itself, servers, limits, call_s
        self._shared = {
            number: Connection(server, limits, call_s)
            for number, server in enumerate(servers)
            if server.scope == "replica"
        }
        self._server_of: dict[str, int] = {}
        self._specs: list[Mapping[str, Any]] = []

    @classmethod
    def of_job(cls, itself: Environments, environment: Environment, reward: Reward) -> Self:
        """The environment `itself` with the servers that a job names, which have the limits of its `reward`."""
        required = reward.isolation == "required"
        paths, hidden = tuple(more_paths()), tuple(hidden_paths())
        limits = Limits(reward.memory_mb, reward.network, required, paths, hidden)
        return cls(itself, environment.mcp, limits, environment.call_s)

    async def start(self) -> None:
        """Starts the environment, then asks every server for its tools."""
        await self._itself.start()
        try:
            found = await asyncio.gather(*(self._tools(number) for number in range(len(self._servers))))
            self._enter(found)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await asyncio.gather(self._itself.close(), *(each.close() for each in self._shared.values()))

    @property
    def most_episodes(self) -> int:
        """Episodes that can run at the same time."""
        return self._itself.most_episodes

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return [*self._itself.tools, *self._specs]

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        async with self._itself.session() as itself, AsyncExitStack() as stack:
            own = {}
            for number, server in enumerate(self._servers):
                if server.scope == "episode":
                    try:
                        opened = connected(server, self._limits, self._call_s)
                        own[number] = await stack.enter_async_context(opened)
                    except Unreachable as error:
                        raise EnvironmentFailed(f"mcp {named(server)}: {error}") from error
            yield _Session(itself, self._servers, self._server_of, {**self._shared, **own})

    async def _tools(self, number: int) -> Sequence[Tool]:
        server = self._servers[number]
        try:
            if number in self._shared:
                await self._shared[number].open()
                return self._shared[number].tools
            async with connected(server, self._limits, self._call_s) as connection:
                return connection.tools
        except Unreachable as error:
            raise Unavailable(
                f"{FIELD}.{number}: {named(server)}: {error}.",
                "start the server where every replica reaches it, or correct command or url.",
            ) from error

    def _enter(self, found: Sequence[Sequence[Tool]]) -> None:
        """Notes who has which tool. Raises InvalidJob for a name that two have."""
        taken = {each["function"]["name"]: "the environment" for each in self._itself.tools}
        for number, tools in enumerate(found):
            server = self._servers[number]
            for each in tools:
                if other := taken.get(each.name):
                    fix = "name the tools that are offered in `tools`, without one of the two."
                    reason = f"{named(server)} and {other} both have a tool of this name"
                    raise refused(f"{FIELD}.{number}.tools", each.name, reason, fix)
                taken[each.name] = named(server)
                self._server_of[each.name] = number
                described = {"name": each.name, "description": each.description or "", "parameters": each.input_schema}
                self._specs.append({"type": "function", "function": described})


class _Session:
    """The session of the environment, with the servers' tools."""

    def __init__(
        self,
        itself: Session,
        servers: Sequence[McpServer],
        server_of: Mapping[str, int],
        connections: Mapping[int, Connection],
    ) -> None:
        self._itself, self._servers, self._server_of, self._connections = itself, servers, server_of, connections

    async def reset(self, row: Mapping[str, Any]) -> list[Message]:
        return await self._itself.reset(row)

    async def step(self, message: Mapping[str, Any]) -> tuple[list[Message], float | None, bool]:
        return await self._itself.step(message)

    async def score(self) -> tuple[float | None, dict[str, Any]]:
        return await self._itself.score()

    async def call(self, name: str, arguments: Any) -> Called:
        number = self._server_of.get(name)
        if number is None:
            return await self._itself.call(name, arguments)
        if not isinstance(arguments, Mapping):
            text = f"Error: the arguments of {name} are not an object with the parameters' names."
            return Called(text, failed=True)
        try:
            return await self._connections[number].call(name, arguments)
        except Unreachable as error:
            if self._servers[number].scope == "episode":
                raise EnvironmentFailed(f"mcp {named(self._servers[number])}: {error}") from error
            return Called(f"Error: {name} is not available: {error}.", failed=True)

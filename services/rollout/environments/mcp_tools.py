"""Connections to servers of the Model Context Protocol, and an environment with their tools beside its own."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self

import httpx2
import structlog
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult, TextContent, Tool

from millrace.errors import Unavailable, refused
from millrace.sandbox.command import Limits, sandboxed
from millrace.spec.environment import Environment, McpServer
from millrace.spec.model import Reward
from millrace.wire.reach import may_take_proxy
from services.rollout.environments.environment import Called, EnvironmentFailed, Environments, Session
from services.rollout.environments.host import LONGEST_RESULT
from services.rollout.user_process.process import hidden_paths, more_paths, passed_environment

log = structlog.get_logger(__name__)
START_S = 60.0
"""How long a server may take to start and to say which tools it has."""
CLOSE_S = 10.0
"""How long a server may take to end, before it is left to its sandbox."""
MOST_TOOLS = 1024
MOST_TIMEOUTS = 3
"""Calls in a row that time out before the connection is made again: the server may hang as a whole."""
LONGEST_REASON = 500


class Unreachable(Exception):
    """There is no connection to the server; the text says why."""


class Connection:
    """A connection, held by a task of its own, so that what breaks in it does not cancel an episode."""

    def __init__(self, server: McpServer, limits: Limits, call_s: float) -> None:
        """`limits` are those of a server that is a command, `call_s` the seconds that a call may take."""
        self._server, self._limits, self._call_s = server, limits, call_s
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._opening = asyncio.Lock()
        self._timeouts = 0
        self.tools: Sequence[Tool] = ()
        """The tools that are offered. Valid once it has been open."""

    async def open(self) -> Client:
        """The open connection. Raises Unreachable."""
        async with self._opening:
            if self._client is not None and self._task is not None and not self._task.done():
                return self._client
            self._closing = asyncio.Event()
            opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._hold(opened, self._closing))
            try:
                async with asyncio.timeout(START_S):
                    self._client = await opened
            except TimeoutError as error:
                self._task.cancel()
                raise Unreachable(f"no answer within {START_S:g} s") from error
            return self._client

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Called:
        """What a tool answers. Raises Unreachable if the connection is lost; it is made again for the next call."""
        client = await self.open()
        try:
            async with asyncio.timeout(self._call_s):
                result = await client.call_tool(name, dict(arguments))
        except TimeoutError:
            self._timeouts += 1
            if self._timeouts >= MOST_TIMEOUTS:
                await self.close()
            return Called(f"Error: {name} took longer than {self._call_s:g} s.", failed=True)
        except MCPError as error:
            if not await self._answers(client):
                raise Unreachable(_reason(error)) from error
            return Called(f"Error: {error.message}"[:LONGEST_RESULT], failed=True)
        except Exception as error:
            # What a server answers goes through the library's checks, which raise errors of many kinds.
            await self.close()
            raise Unreachable(_reason(error)) from error
        self._timeouts = 0
        return Called(_text(result), failed=result.is_error)

    async def close(self) -> None:
        """Ends the connection, and the server if it is a command."""
        task, self._task, self._client, self._timeouts = self._task, None, None, 0
        if task is not None:
            self._closing.set()
            await asyncio.wait({task}, timeout=CLOSE_S)
            task.cancel()

    async def _answers(self, client: Client) -> bool:
        """Whether the server still answers. A connection that is lost is closed."""
        try:
            async with asyncio.timeout(self._call_s):
                await client.list_tools(cache_mode="bypass")
        except (MCPError, TimeoutError):
            await self.close()
            return False
        return True

    async def _hold(self, opened: asyncio.Future[Client], closing: asyncio.Event) -> None:
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(await self._connected(stack))
                self.tools = _offered(await _all_tools(client), self._server)
                if not opened.done():
                    opened.set_result(client)
                await closing.wait()
        except Exception as error:
            # Transports raise errors of many kinds, in groups.
            if opened.done():
                log.warning("the connection to an MCP server is lost", server=named(self._server), why=_reason(error))
            else:
                opened.set_exception(Unreachable(_reason(error)))

    async def _connected(self, stack: AsyncExitStack) -> Client:
        if self._server.url is None:
            command = sandboxed(self._server.command, self._limits)
            started = StdioServerParameters(command=command[0], args=command[1:], env=passed_environment())
            return Client(started, cache=None)
        headers = {}
        if (variable := self._server.token_env) is not None:
            if variable not in os.environ:
                raise Unreachable(f"the replica has no environment variable {variable}")
            headers = {"Authorization": f"Bearer {os.environ[variable]}"}
        url = self._server.url
        client = httpx2.AsyncClient(headers=headers, timeout=self._call_s, trust_env=may_take_proxy(url))
        http = await stack.enter_async_context(client)
        return Client(streamable_http_client(url, http_client=http), cache=None)


@asynccontextmanager
async def connected(server: McpServer, limits: Limits, call_s: float) -> AsyncIterator[Connection]:
    """An open connection of its own. Raises Unreachable."""
    connection = Connection(server, limits, call_s)
    try:
        await connection.open()
        yield connection
    finally:
        await connection.close()


def named(server: McpServer) -> str:
    """How messages name a server."""
    return server.url if server.url is not None else " ".join(server.command)


async def _all_tools(client: Client) -> list[Tool]:
    tools: list[Tool] = []
    cursor = None
    while len(tools) < MOST_TOOLS:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        if (cursor := page.next_cursor) is None or not page.tools:
            return tools
    raise Unreachable(f"it has more than {MOST_TOOLS} tools")


def _offered(tools: Sequence[Tool], server: McpServer) -> list[Tool]:
    if server.tools is None:
        return list(tools)
    by_name = {each.name: each for each in tools}
    if missing := [name for name in server.tools if name not in by_name]:
        known = ", ".join(by_name) or "none"
        raise Unreachable(f"it has no tool {', '.join(missing)}; its tools: {known}")
    return [by_name[name] for name in server.tools]


def _text(result: CallToolResult) -> str:
    """The content as text; what is no text is named by its kind."""
    parts = [each.text if isinstance(each, TextContent) else f"[{each.type}]" for each in result.content]
    return "\n".join(parts)[:LONGEST_RESULT]


def _reason(error: BaseException) -> str:
    """The innermost of a group of errors, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = error.message if isinstance(error, MCPError) else str(error)
    return (" ".join(text.split()) or type(error).__name__)[:LONGEST_REASON]


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
        self.reset, self.step, self.score = itself.reset, itself.step, itself.score

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

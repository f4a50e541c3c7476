"""A connection to a server of the Model Context Protocol, and its tools."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx2
import structlog
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult, TextContent, Tool

from millrace.sandbox.command import Limits, sandboxed
from millrace.spec.environment import McpServer
from millrace.wire.reach import may_take_proxy
from services.rollout.environments.environment import Called
from services.rollout.environments.host import LONGEST_RESULT
from services.rollout.user_process.process import passed_environment

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

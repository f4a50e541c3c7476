"""Connections of libraries that speak no TLS themselves, carried over mutual TLS between two hosts.

    rank ── loopback ── way_to ══ TLS ══ Door ── loopback ── server

On each host the plaintext is on the loopback only.
"""

import asyncio
import functools
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import structlog

from millrace.errors import Unavailable
from millrace.wire.tls.faults import diagnose
from millrace.wire.tls.files import Use
from millrace.wire.tls.own import identity, server_context

Result = TypeVar("Result")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
log = structlog.get_logger(__name__)
CONNECT_S = 10.0
"""Limit of the time to connect."""
CHUNK = 256 << 10
LOOPBACK = "127.0.0.1"


class Door:
    """Lets callers with a certificate of MILLRACE_TLS_CA in to a server on the loopback. Raises Unavailable."""

    def __init__(self, host: str, inner_port: int) -> None:
        """Listens at a free port of `host`, for the server at `inner_port`."""

        async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _join((reader, writer), lambda: asyncio.open_connection(LOOPBACK, inner_port))

        try:
            self._server = _run(asyncio.start_server(enter, host, 0, ssl=server_context(Use.MEMBERS)))
        except OSError as error:
            raise Unavailable(f"cannot listen on {host}: {error.strerror or error}.", "set MILLRACE_HOST.") from error
        self.port: int = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Lets nobody in any more. Connections end when one of their sides does."""
        _loop(os.getpid()).call_soon_threadsafe(self._server.close)


def way_to(host: str, port: int, within_s: float) -> tuple[str, int]:
    """The address at which a library connects to the server at `host`:`port`, within `within_s`: a port of the loopback
    that leads there by TLS; the address itself if this process has no identity."""
    own = identity()
    if own is None:
        return host.strip("[]"), port
    context, name = own.lasting_context(Use.CLIENT), host.strip("[]")

    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _join(
                (reader, writer), lambda: asyncio.open_connection(name, port, ssl=context, server_hostname=name)
            )
        except (OSError, TimeoutError) as error:
            why = await asyncio.to_thread(diagnose, name, port)
            log.warning("a connection by TLS was not made", to=f"{host}:{port}", error=str(why or error))

    server = _run(asyncio.start_server(leave, LOOPBACK, 0))
    _loop(os.getpid()).call_soon_threadsafe(
        lambda: asyncio.get_running_loop().call_later(within_s + CONNECT_S, server.close)
    )
    return LOOPBACK, int(server.sockets[0].getsockname()[1])


async def _join(near: Streams, connect: Callable[[], Awaitable[Streams]]) -> None:
    """Passes on what comes from either side until one ends."""
    try:
        async with asyncio.timeout(CONNECT_S):
            far = await connect()
    except BaseException:
        near[1].close()
        raise
    try:
        passing = [asyncio.create_task(_pass_on(near[0], far[1])), asyncio.create_task(_pass_on(far[0], near[1]))]
        await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)
    finally:
        near[1].close()
        far[1].close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run_coroutine_threadsafe(work, _loop(os.getpid())).result()


@functools.cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The event loop of this process that carries tunnels, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="tunnels of TLS", daemon=True).start()
    return loop

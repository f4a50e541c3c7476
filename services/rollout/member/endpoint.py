"""The HTTP server of a replica, for agents or for those who ask a pool's model."""

import asyncio
import contextlib
import socket

from millrace.wire.http.server import HttpServer, listening

KEEP_ALIVE_S = 30
"""How long a connection without a request is kept. Clients connect again for a turn after a longer pause."""
BACKLOG = 4096
"""Connections that wait to be accepted."""


class HttpEndpoint:
    """Serves an ASGI application at `host:port`; port 0 takes a free one. Raises Unavailable where the port is
    taken."""

    def __init__(self, app: object, host: str, port: int) -> None:
        self._held = contextlib.ExitStack()
        self._socket = self._held.enter_context(listening(host, port, "--sessions-port", BACKLOG))
        self.port = int(self._socket.getsockname()[1])
        self._server = HttpServer(app, KEEP_ALIVE_S, BACKLOG)
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Answers requests from now on."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def serve_also(self, listener: socket.socket) -> asyncio.Server:
        """Answers requests at another listening socket too, until the server that is returned is closed."""
        return await self._server.serve_also(listener)

    async def stop(self) -> None:
        """Ends the requests in progress within a few seconds."""
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)
        self._held.close()

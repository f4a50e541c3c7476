"""An HTTP server in the event loop of a service, which handles signals itself."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial

import uvicorn

from millrace.errors import Unavailable
from millrace.wire.http.connections import PatientProtocol

GRACE_S = 5.0
"""Time for requests in progress when the service stops."""


class HttpServer(uvicorn.Server):
    """Serves an ASGI application until `should_exit` is set."""

    def __init__(self, app: object, keep_alive_s: int = 5, backlog: int = 2048) -> None:
        """`keep_alive_s`: how long a connection without a request is kept."""
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                http=PatientProtocol,
                log_config=None,
                access_log=False,
                backlog=backlog,
                timeout_keep_alive=keep_alive_s,
                timeout_graceful_shutdown=int(GRACE_S),
            )
        )

    async def serve_also(self, listener: socket.socket) -> asyncio.Server:
        """Answers requests at another listening socket too, until the server that is returned is closed. `serve` has
        begun."""
        create = partial(
            PatientProtocol, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return await asyncio.get_running_loop().create_server(create, sock=listener)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def listening(host: str, port: int, option: str, backlog: int = 1024) -> Iterator[socket.socket]:
    """A listening socket. Raises Unavailable where the port is taken; `option` of the service names another one."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
    except OSError as error:
        raise Unavailable(f"cannot listen on {host}:{port}: {error}.", "name an address of this host.") from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(backlog)
        except OSError as error:
            what = f"cannot listen on {host}:{port}: the address is taken or not this host's ({error.strerror})."
            raise Unavailable(what, f"choose another port with {option}, or stop the process that uses it.") from error
        yield listener

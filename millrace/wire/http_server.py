"""An HTTP server in the event loop of a service, which handles signals itself."""

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from millrace.errors import Unavailable, Untrusted
from millrace.wire.tls import Identity, Use, identity, server_context

FORBIDDEN = "urn:millrace:problem:forbidden"
"""The `type` of a problem document for a request that is not allowed."""
GRACE_S = 5.0
"""Time for requests in progress when the service stops."""


class HttpServer(uvicorn.Server):
    """Serves an ASGI application until `should_exit` is set."""

    def __init__(
        self, app: object, keep_alive_s: int = 5, backlog: int = 2048, *, certificate_required: bool = False
    ) -> None:
        """`keep_alive_s`: how long a connection without a request is kept. `certificate_required`: callers need one by
        TLS, which is spoken if this process has it. Raises InvalidState if it has no certificate itself."""
        context = server_context(Use.HTTP_MEMBERS if certificate_required else Use.HTTP)
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                http=type("_Protocol", (PatientProtocol,), {"own": identity()}),
                ws="none",
                log_config=None,
                access_log=False,
                backlog=backlog,
                timeout_keep_alive=keep_alive_s,
                timeout_graceful_shutdown=int(GRACE_S),
                ssl_context_factory=None if context is None else lambda config, default: context,
            )
        )

    async def serve_also(self, listener: socket.socket) -> asyncio.Server:
        """Answers requests at another listening socket of this host too, in plaintext, until the returned server is
        closed. `serve` has begun."""
        create = partial(
            PatientProtocol, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return await asyncio.get_running_loop().create_server(create, sock=listener)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def listening(host: str, port: int, option: str, backlog: int = 1024) -> Iterator[socket.socket]:
    """A listening socket. Raises Unavailable if the port is taken; `option` of the service names another one."""
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


PATIENCE_S = 30.0
"""A connection on which nothing moves between two looks, this far apart, is cut off."""
LARGEST_HEAD = 64 << 10
"""Bytes of a request's headers."""
LARGEST_REST = 64 << 20
"""Bytes of a body that may still come after the answer; they are thrown away."""


class PatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # uvicorn chooses the class
    """One connection. uvicorn itself waits without a limit for the end of the headers, for the rest of a body that was
    not asked for, and for a reader."""

    _unfinished = 0
    """Bytes of headers, or of an unwanted body, since the last request began."""
    _look: asyncio.TimerHandle | None = None
    own: Identity | None = None
    """The identity of the server."""
    _certificate = b""
    """The caller's certificate, in DER; empty: none was shown."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if (encrypted := transport.get_extra_info("ssl_object")) is not None:
            self._certificate = encrypted.getpeercert(binary_form=True) or b""
        self._look_again(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._certificate and self._between_requests and (error := self._refusal()) is not None:
            self.transport.write(error)
            self.transport.close()
            return
        before = self.cycle
        super().data_received(data)
        if not self._between_requests or self.cycle is not before:
            self._unfinished = 0
            return
        self._unfinished += len(data)
        if self._unfinished > (LARGEST_REST if before is not None and before.more_body else LARGEST_HEAD):
            self.transport.abort()

    def _refusal(self) -> bytes | None:
        """The answer to a caller whose certificate does not hold any more."""
        try:
            if self.own is not None:
                self.own.refresh().callers.check(ssl.DER_cert_to_PEM_cert(self._certificate).encode())
        except Untrusted as error:
            problem = {"type": FORBIDDEN, "title": "forbidden", "status": 403, "detail": error.what, "fix": error.fix}
            body = json.dumps(problem | {"mistakes": []}).encode()
            head = f"HTTP/1.1 403 Forbidden\r\nContent-Type: application/problem+json\r\nContent-Length: {len(body)}"
            return f"{head}\r\nConnection: close\r\n\r\n".encode() + body
        return None

    @property
    def _between_requests(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def _look_again(self, before: tuple[Any, bool, int] | None) -> None:
        """Cuts the connection off if nothing has moved since the look `before`."""
        unread = self.transport.get_write_buffer_size()
        now = (self.cycle, self._between_requests, unread)
        if now == before and (self._between_requests or unread):
            self.transport.abort()
        else:
            self._look = self.loop.call_later(PATIENCE_S, self._look_again, now)

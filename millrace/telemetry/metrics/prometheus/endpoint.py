"""The page `/metrics` of a trainer or of a replica. The coordinator serves its own with REST."""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Annotated, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import structlog
import typer
from prometheus_client import CollectorRegistry, make_wsgi_app

from millrace.errors import Unavailable

log = structlog.get_logger(__name__)
MetricsPortOption = Annotated[
    int,
    typer.Option(
        envvar="MILLRACE_METRICS_PORT",
        min=0,
        max=65_535,
        help="Port at which Prometheus reads this service's metrics; 0: a free port, which `millrace fleet` tells.",
    ),
]
MOST_READERS = 8
"""Connections at a time. A further one takes the place of the one that has waited longest without a request."""
READER_S = 10.0
"""How long a reader may take to send its request, and to take the page."""
REFRESH_S = 2.0
"""How long the event loop may take to bring the values up to date. Then the page has those of the last time."""


class MetricsEndpoint:
    """Serves the metrics of `registry` at `port` (0: a free one) from a thread of its own, so that the page is there
    also while the event loop is busy. `refresh` is called on the event loop before each page. Like REST's `/metrics`
    it needs no token."""

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str,
        port: int,
        refresh: Callable[[], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Listens from now on, by TLS with the context `tls`. Raises Unavailable if the port is taken. To be called
        on the event loop."""
        self._loop, self._refresh = asyncio.get_running_loop(), refresh
        page: WSGIApplication = make_wsgi_app(registry)

        def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            self._bring_up_to_date()
            return page(environ, start_response)

        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        kind = type("_Server", (_PageServer,), {"address_family": family})
        try:
            self._server: _PageServer = kind((host.strip("[]"), port), _Request)
        except OSError as error:
            what = f"cannot serve metrics at {host}:{port}: {error.strerror or error}."
            raise Unavailable(what, "choose another port with --metrics-port.") from error
        self._server.tls = tls
        self._server.set_app(application)
        self.port: int = self._server.server_port
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        log.info("metrics are served", url=f"http{'' if tls is None else 's'}://{host}:{self.port}/metrics")

    def close(self) -> None:
        """Ends the page."""
        self._server.shutdown()
        self._server.server_close()

    def _bring_up_to_date(self) -> None:
        done = threading.Event()

        def refresh() -> None:
            try:
                self._refresh()
            finally:
                done.set()

        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(refresh)
            done.wait(REFRESH_S)


class _PageServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    tls: ssl.SSLContext | None = None

    def __init__(self, *arguments: Any) -> None:
        self._lock = threading.Lock()
        self._silent: dict[Any, None] = {}
        """Connections that have sent no request yet, in the order in which they came."""
        self._answered: set[Any] = set()
        super().__init__(*arguments)

    def server_bind(self) -> None:
        """Binds as WSGIServer does, without asking a name server for the name of this host."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """One thread for each connection, of which there are at most MOST_READERS."""
        with self._lock:
            full = len(self._silent) + len(self._answered) >= MOST_READERS
            oldest = next(iter(self._silent), None) if full else None
            if oldest is not None:
                del self._silent[oldest]
                with contextlib.suppress(OSError):  # it has gone away by itself
                    oldest.shutdown(socket.SHUT_RDWR)
            if room := oldest is not None or not full:
                self._silent[request] = None
        if room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def heard(self, request: Any) -> bool:
        """A connection has sent its request. Answers whether it has still its place."""
        with self._lock:
            if request not in self._silent:
                return False
            del self._silent[request]
            self._answered.add(request)
            return True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers one request."""
        try:
            if self.tls is not None:
                request = self._encrypted(request, self.tls)
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._silent.pop(request, None)
                self._answered.discard(request)

    def _encrypted(self, request: Any, tls: ssl.SSLContext) -> Any:
        """The connection by TLS, in the place of `request`. The handshake is made when the request is read."""
        request.settimeout(READER_S)
        encrypted = tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            if request in self._silent:
                del self._silent[request]
                self._silent[encrypted] = None
        return encrypted

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that goes away is no error of this service."""
        log.debug("a reader of the metrics went away", exc_info=True)


class _Request(WSGIRequestHandler):
    timeout = READER_S
    server: _PageServer

    def parse_request(self) -> bool:
        """Reads the request."""
        return super().parse_request() and self.server.heard(self.connection)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not logged."""

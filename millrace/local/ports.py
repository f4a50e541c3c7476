"""The ports of this host.

Programs outside of this repository import `free_port` from here; `tests/test_import_paths.py` keeps the path.
"""

import socket
from collections.abc import Iterable

from millrace.errors import Unavailable


def check_free(ports: Iterable[tuple[int, int]]) -> None:
    """Raises Unavailable, naming the option, if one of `ports` (REST, gRPC) is taken."""
    for option, port in (each for pair in ports for each in zip(("--http-port", "--grpc-port"), pair, strict=True)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise Unavailable(
                    f"port {port} is not available: {error.strerror}.",
                    f"choose another with {option}, or stop what holds it (`ss -ltnp 'sport = :{port}'` names it).",
                ) from error


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

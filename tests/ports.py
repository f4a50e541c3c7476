"""Ports for services that have to know theirs before they start."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port of 127.0.0.1 that nobody else gets meanwhile. It is bound and not listened on, so that a service which
    allows the address to be reused, as all of Millrace do, may bind it and listen."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])

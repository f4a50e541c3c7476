"""Stores where ranks meet: torch's TCPStore, which itself has neither encryption nor a secret.

A store for ranks of one host listens on the loopback. If the process has an identity (`millrace/wire/tls/`), one for
ranks of other hosts does too, behind a door of mutual TLS, and ranks reach it through a tunnel.
"""

import socket
import weakref
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from millrace.wire.address import bind_address
from millrace.wire.reach import is_loopback
from millrace.wire.tls import identity
from millrace.wire.tls.tunnel import Door, way_to


class _BehindDoor(TCPStore):
    """A store that this process serves. Its door is open as long as it lives."""

    def keep(self, door: Door) -> None:
        weakref.finalize(self, door.close)


def serve_store(host: str, world_size: int | None, timeout_s: float) -> tuple[TCPStore, int]:
    """Serves a store at a free port of this host; returns it and the port. The store lives as long as the returned
    object; `host` is the address that the other ranks are given."""
    named: dict[str, Any] = {"is_master": True, "timeout": timedelta(seconds=timeout_s), "wait_for_workers": False}
    if not is_loopback(host) and identity() is None:
        store = TCPStore(host, 0, world_size, **named)
        return store, store.port
    listener = socket.create_server(("127.0.0.1", 0))
    port = int(listener.getsockname()[1])
    here = _BehindDoor("127.0.0.1", port, world_size, master_listen_fd=listener.detach(), **named)
    if is_loopback(host):
        return here, port
    door = Door(bind_address(host), port)
    here.keep(door)
    return here, door.port


def connect_store(host: str, port: int, timeout_s: float, world_size: int | None = None) -> TCPStore:
    """A client of a store that `serve_store` serves. Raises RuntimeError if it does not answer in time."""
    limit = timedelta(seconds=timeout_s)
    host, port = ("127.0.0.1", port) if is_loopback(host) else way_to(host, port, timeout_s)
    return TCPStore(host, port, world_size, is_master=False, timeout=limit, wait_for_workers=False)

"""Stores where ranks meet, through doors and tunnels of mutual TLS."""

import dataclasses
import gc
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import structlog.testing

from millrace.weights.transfer import store as stores
from millrace.weights.transfer.store import connect_store, serve_store
from millrace.wire.tls.own import LOOK_EVERY_S
from millrace.wire.tls.tunnel import Door, way_to
from tests.certificates import Authority

WITHIN_S = 3.0
ELSEWHERE = "10.255.255.1"
Become = Callable[[dict[str, str]], None]


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Become:
    """Gives this process an identity. The loopback stands for the network between two hosts."""
    monkeypatch.setattr(stores, "is_loopback", lambda host: False)

    def give(variables: dict[str, str]) -> None:
        for name in ("CERT", "KEY", "CA", "CRL", "NAME"):
            monkeypatch.setenv(f"MILLRACE_TLS_{name}", "")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return give


def addresses(port: int) -> set[str]:
    """Where this process listens at `port`."""
    found = psutil.Process().net_connections()
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port}


def test_a_store_of_one_host_listens_on_the_loopback() -> None:
    store, port = serve_store("127.0.0.1", 1, WITHIN_S)
    assert addresses(port) == {"127.0.0.1"}
    connect_store("localhost", port, WITHIN_S).set("key", "value")
    assert store.get("key") == b"value"


def test_ranks_meet_through_doors_and_tunnels(become: Become, tmp_path: Path) -> None:
    fleet = Authority(tmp_path)
    become(fleet.member("trainer").variables())
    store, port = serve_store("127.0.0.1", 2, WITHIN_S)
    become(fleet.member("replica").variables())
    client = connect_store("127.0.0.1", port, WITHIN_S)
    client.set("key", "v" * 3_000_000)
    assert store.get("key") == b"v" * 3_000_000
    store.set("other", "value")
    assert client.get("other") == b"value"
    del store
    gc.collect()
    deadline = time.monotonic() + 10
    while addresses(port):
        assert time.monotonic() < deadline, "the door is still open"
        time.sleep(0.05)


@pytest.mark.parametrize("who", ["stranger", "revoked", "plaintext"])
def test_a_store_lets_in_members_only(who: str, become: Become, tmp_path: Path) -> None:
    fleet = Authority(tmp_path / "fleet")
    become(dataclasses.replace(fleet.member("trainer"), crl=fleet.revoke()).variables())
    _, port = serve_store("127.0.0.1", 2, WITHIN_S)
    if who == "plaintext":
        become({})
    elif who == "revoked":
        become(fleet.member("revoked").variables())
        fleet.revoke("revoked")
        time.sleep(LOOK_EVERY_S)
    else:
        files = Authority(tmp_path / "other", "other").member("stranger")
        become(dataclasses.replace(files, ca=fleet.ca).variables())
    with structlog.testing.capture_logs(), pytest.raises(RuntimeError):
        connect_store("127.0.0.1", port, 1.0).set("key", "value")


def test_a_tunnel_says_why_a_connection_was_not_made(become: Become, tmp_path: Path) -> None:
    fleet, other = Authority(tmp_path / "fleet"), Authority(tmp_path / "other", "other")
    become(fleet.member("trainer").variables())
    door = Door("127.0.0.1", 9)
    become(dataclasses.replace(fleet.member("replica"), ca=other.ca).variables())
    address = way_to("127.0.0.1", door.port, 1.0)
    with structlog.testing.capture_logs() as logs, socket.create_connection(address) as near:
        assert near.recv(1) == b""
        deadline = time.monotonic() + 5
        while not logs and time.monotonic() < deadline:
            time.sleep(0.05)
    assert "its certificate is not signed by a CA" in logs[0]["error"]
    door.close()


def test_bytes_arrive_in_both_directions_until_a_side_ends(become: Become, tmp_path: Path) -> None:
    become(Authority(tmp_path).member("both").variables())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        door = Door("127.0.0.1", listener.getsockname()[1])

        def echo() -> None:
            connection, _ = listener.accept()
            with connection:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)

        thread = threading.Thread(target=echo, daemon=True)
        thread.start()
        with socket.create_connection(way_to("127.0.0.1", door.port, 1.0), 10) as near:
            near.sendall(b"here")
            assert near.recv(4) == b"here"
        thread.join(10)
        assert not thread.is_alive(), "the end of one side is the end of the other"
        door.close()

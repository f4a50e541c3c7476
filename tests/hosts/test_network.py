"""The hosts themselves: links that are cut and slow, and nothing that is left."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from tests.hosts.network import NAMESPACES, Host, Network

Result = TypeVar("Result")
PORT = 7000
SENT = 4 << 20


def at(host: Host, work: Callable[[], Result]) -> Result:
    with ThreadPoolExecutor(1, initializer=host.enter) as thread:
        return thread.submit(work).result()


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(["one", "two"]) as network:
        yield network


@contextlib.contextmanager
def served(network: Network, timeout_s: float = 60.0) -> Iterator[Callable[[], float]]:
    """A function that connects from the first host to the second, sends SENT bytes, and answers the seconds."""
    address = (network["two"].address, PORT)
    with at(network["two"], lambda: socket.create_server(address)) as listening:

        def connected() -> float:
            with at(network["one"], lambda: socket.create_connection(address, timeout=timeout_s)) as sending:
                taken, _ = listening.accept()
                with taken, ThreadPoolExecutor(1) as thread:
                    sending.settimeout(60.0)
                    began = time.monotonic()
                    thread.submit(sending.sendall, bytes(SENT))
                    left = SENT
                    while left:
                        left -= len(taken.recv(1 << 20))
                    return time.monotonic() - began

        yield connected


def test_nothing_passes_a_cut_link(network: Network) -> None:
    with served(network) as connected:
        connected()
    network.cut("two")
    with served(network, timeout_s=0.5) as connected, pytest.raises(OSError):
        connected()
    network.heal("two")
    with served(network) as connected:
        connected()


def test_a_slow_link_takes_the_time_of_its_bytes(network: Network) -> None:
    with served(network) as connected:
        network.throttle("two", 100)
        least_s = 8 * (SENT - (1 << 20)) / 100e6  # the first bytes are let through at once
        assert connected() > least_s
        network.release("two")


def test_a_host_has_its_own_name_and_ports(network: Network) -> None:
    assert at(network["one"], socket.gethostname) == "one" and socket.gethostname() != "one"
    with served(network), at(network["one"], lambda: socket.create_server(("", PORT))):
        pass


def test_what_a_killed_test_left_is_removed() -> None:
    """Its namespaces, and what runs in them."""
    program = (
        "import subprocess, sys, time\n"
        "from tests.hosts.network import Network\n"
        "network = Network(['left']).__enter__()\n"
        "subprocess.Popen(network['left'].command(['sleep', '600']))\n"
        "while not network['left'].processes(): time.sleep(0.01)\n"
        "print(network['left'].namespace, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        namespace = killed.stdout.readline().strip()
        killed.send_signal(signal.SIGKILL)
        killed.wait(60)
    assert namespace
    with Network(["other"]):
        assert not (NAMESPACES / namespace).exists()

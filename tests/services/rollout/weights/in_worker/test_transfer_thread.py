"""A worker's thread of a transfer, aborted at every point: nobody is stuck, nothing is written or kept after it."""

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from millrace.contracts.v1 import weights_pb2
from millrace.errors import PublicationFailed
from millrace.weights.plans.manifest import Manifest
from millrace.weights.transfer.channels.channel import Channel, ChannelMessage
from millrace.weights.transfer.channels.gloo import GlooChannel
from millrace.weights.transfer.session import FailureSignal, PublicationSession
from millrace.weights.transfer.store import connect_store, serve_store
from services.rollout.weights.in_worker.sharded import TransferThread
from services.rollout.weights.transfer_request import TransferRequest
from tests.forked import CONTEXT

CPU = torch.device("cpu")


def transfer_request(
    port: int, *, attempt: int = 1, world_size: int = 1, rank: int = 0, joined: bool = False
) -> TransferRequest:
    at: dict[str, Any] = {"key": f"job/1/1/{attempt}", "version": 1, "host": "127.0.0.1", "port": port}
    at |= {
        "path": weights_pb2.PATH_SHARDED,
        "world_size": world_size,
        "first_rank": rank,
        "timeout_s": 120.0,
        "communicator": "first",
        "already_joined": joined,
    }
    return TransferRequest(manifest=Manifest(()), **at)


def nothing(channel: Channel) -> str:
    channel.exchange([], []).wait()
    return "done"


def _serve(told: Connection) -> None:
    _, port = held = serve_store("127.0.0.1", 2, 5.0)
    told.send(port)
    time.sleep(600)
    del held


@pytest.fixture
def elsewhere() -> Iterator[tuple[int, int]]:
    """A store in a process of its own: its id and port."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    assert process.pid is not None
    yield process.pid, ours.recv()
    os.kill(process.pid, signal.SIGCONT)
    process.kill()
    process.join(60)


def test_one_that_never_began_leaves_the_communicator_as_it_was() -> None:
    _store, port = serve_store("127.0.0.1", 1, 20.0)
    session = PublicationSession()
    for thread, begins in (
        (TransferThread(transfer_request(port), 0, nothing, CPU, session), True),
        (TransferThread(transfer_request(port, attempt=2, joined=True), 0, nothing, CPU, session), False),
        (TransferThread(transfer_request(port, attempt=3, joined=True), 0, nothing, CPU, session), True),
    ):
        if begins:
            thread.begin()
            assert (thread.wait(60), thread.failure, session.key) == ("done", None, "first")
        thread.close()
    session.leave()


def test_an_error_that_nobody_expects_fails_the_publication_at_once() -> None:
    def work(channel: Channel) -> str:
        raise AttributeError("there is no such thing")

    _store, port = serve_store("127.0.0.1", 1, 20.0)
    thread = TransferThread(transfer_request(port), 0, work, CPU, PublicationSession())
    thread.begin()
    with pytest.raises(PublicationFailed, match=r"rank 0: AttributeError\('there is no such thing'\)"):
        thread.wait(60)
    thread.close()


def test_a_communicator_that_failed_is_not_one_that_this_rank_is_in() -> None:
    _store, port = serve_store("127.0.0.1", 1, 20.0)
    session = PublicationSession()
    thread = TransferThread(transfer_request(port), 0, nothing, CPU, session)
    thread.begin()
    thread.wait(60)
    session.fail("somebody is gone")
    assert session.key == ""


def test_what_was_being_received_is_given_back_and_a_late_message_goes_nowhere() -> None:
    store, port = serve_store("127.0.0.1", 2, 20.0)
    others: list[GlooChannel] = []

    def come() -> None:
        others.append(
            GlooChannel.join("127.0.0.1", port, key="first", rank=0, world_size=2, timeout_s=20.0, store=store)
        )

    other = threading.Thread(target=come)
    other.start()
    buffers = [torch.zeros(1 << 20, dtype=torch.uint8)]
    kept, asked = weakref.ref(buffers[0]), threading.Event()
    memory = buffers[0].numpy()

    def receive(channel: Channel) -> None:
        exchange = channel.exchange([], [ChannelMessage(0, 0, buffers[0])])
        asked.set()
        exchange.wait()

    thread = TransferThread(transfer_request(port, world_size=2, rank=1), 1, receive, CPU, PublicationSession())
    gc.disable()
    try:
        thread.begin()
        assert asked.wait(60)
        thread.close()
        other.join(60)
        time.sleep(1.0)
        with pytest.raises(PublicationFailed):
            others[0].exchange([ChannelMessage(0, 1, torch.ones(1 << 20, dtype=torch.uint8))], []).wait()
        assert not memory.any()
        buffers.clear()
        assert kept() is None, "nothing waits for the deadline, nor for a collection of garbage"
    finally:
        gc.enable()
        others[0].close()


def test_a_failure_signal_is_not_stuck_in_a_store_that_hangs(elsewhere: tuple[int, int]) -> None:
    pid, port = elsewhere
    failure_signal = FailureSignal(connect_store("127.0.0.1", port, 5.0), "job/1/1/1", lambda reason: None)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.3)
    began = time.monotonic()
    failure_signal.send("a test")
    assert time.monotonic() - began < 60.0


def test_a_thread_is_called_off_where_the_store_stands_still(elsewhere: tuple[int, int]) -> None:
    pid, port = elsewhere
    os.kill(pid, signal.SIGSTOP)
    thread = TransferThread(transfer_request(port, world_size=2, rank=1), 1, nothing, CPU, PublicationSession())
    thread.begin()
    time.sleep(0.3)
    began = time.monotonic()
    thread.close()
    assert time.monotonic() - began < 60.0
    assert thread.failure is not None

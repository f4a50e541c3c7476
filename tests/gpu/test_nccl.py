"""NCCL channels between two processes of one host, a GPU each, one of which stands still."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from millrace.weights.transfer.channels.channel import ChannelMessage
from millrace.weights.transfer.channels.nccl import NcclChannel, unique_id

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.timeout(120),
]
ANSWERS_S = 60.0
Rank = tuple[Any, Connection]


def _rank(asked: Connection, rank: int) -> None:
    """Does what it is asked and answers with the seconds that it took."""
    device = torch.device("cuda", rank)
    channel: Any = None
    while True:
        what, *arguments = asked.recv()
        began = time.monotonic()
        if what == "join":
            key, identity = arguments
            channel = NcclChannel.join(identity, key=key, rank=rank, world_size=2, device=device)
        elif what == "exchange":
            data = torch.full((1 << 20,), 7 * (1 - rank), dtype=torch.uint8, device=device)
            messages = [ChannelMessage(0, 1 - rank, data)]
            torch.cuda.synchronize()
            (channel.exchange(messages, []) if rank == 0 else channel.exchange([], messages)).wait()
            assert data.eq(7).all()
        else:
            getattr(channel, what)()
        asked.send(time.monotonic() - began)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rank]]:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    context, started = multiprocessing.get_context("spawn"), []
    for rank in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(theirs, rank), daemon=True)
        process.start()
        started.append((process, ours))
    yield started
    for process, _ in started:
        process.kill()
        process.join(10)


def ask(ranks: list[Rank], *what: Any) -> list[float]:
    """The seconds that each rank took for it."""
    for _, asked in ranks:
        asked.send(what)
    for _, asked in ranks:
        assert asked.poll(ANSWERS_S), f"{what[0]}: no answer"
    return [asked.recv() for _, asked in ranks]


@pytest.mark.parametrize("end", ["close", "abort"])
def test_its_end_is_not_waited_for_where_a_process_stands_still(end: str, ranks: list[Rank]) -> None:
    ask(ranks, "join", "first", unique_id())
    ask(ranks, "exchange")
    still = ranks[1][0].pid
    os.kill(still, signal.SIGSTOP)
    try:
        (seconds,) = ask(ranks[:1], end)
        assert seconds < 2.0
    finally:
        os.kill(still, signal.SIGCONT)
    ask(ranks[1:], end)
    ask(ranks, "join", "second", unique_id())
    ask(ranks, "exchange")
    assert max(ask(ranks, "close")) < 2.0

import subprocess
import sys
import threading

import pytest
import torch

from millrace.errors import PublicationFailed
from millrace.weights.transfer.channels.gloo import GlooChannel
from millrace.weights.transfer.store import serve_store

TENSORS = [torch.randn(300, 70), torch.randn(5).bfloat16(), torch.arange(7), torch.empty(0)]


def receive(port, key, rank, world, received, timeout_s=20.0):
    channel = GlooChannel.join("127.0.0.1", port, key=key, rank=rank, world_size=world, timeout_s=timeout_s)
    for tensor in TENSORS:
        buffer = torch.empty_like(tensor)
        channel.broadcast(buffer)
        received[rank].append(buffer)
    channel.close()


def test_every_rank_gets_every_bit_and_the_store_serves_the_next_communicator_too():
    store, port = serve_store("127.0.0.1", 3, 20.0)
    for key in ("job/1/1/1", "job/2/1/1"):
        received = {1: [], 2: []}
        threads = [threading.Thread(target=receive, args=(port, key, rank, 3, received)) for rank in (1, 2)]
        for thread in threads:
            thread.start()
        channel = GlooChannel.join("127.0.0.1", port, key=key, rank=0, world_size=3, timeout_s=20.0, store=store)
        for tensor in TENSORS:
            channel.broadcast(tensor)
        for thread in threads:
            thread.join(60)
        channel.close()
        for buffers in received.values():
            assert all(torch.equal(a, b) for a, b in zip(TENSORS, buffers, strict=True))


def test_a_member_that_does_not_come_ends_the_rendezvous_in_time():
    store, port = serve_store("127.0.0.1", 2, 1.0)
    with pytest.raises(PublicationFailed, match="rank 0 of 2 could not join"):
        GlooChannel.join("127.0.0.1", port, key="k", rank=0, world_size=2, timeout_s=1.0, store=store)
    with pytest.raises(PublicationFailed, match="rank 1 of 2"):
        GlooChannel.join("127.0.0.1", 1, key="k", rank=1, world_size=2, timeout_s=1.0)


ABORTS_AND_ENDS = """
import atexit, threading
atexit.register(lambda: print([t.name for t in threading.enumerate() if t.name.startswith("end of")]))
from millrace.weights.transfer.channels.gloo import GlooChannel
from millrace.weights.transfer.store import serve_store
store, port = serve_store("127.0.0.1", 1, 20.0)
GlooChannel.join("127.0.0.1", port, key="k", rank=0, world_size=1, timeout_s=20.0, store=store).abort()
"""


def test_a_process_ends_after_the_connections_that_it_closes():
    """A thread that frees the group while the interpreter ends would abort the process."""
    ended = subprocess.run([sys.executable, "-c", ABORTS_AND_ENDS], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[]\n", "")

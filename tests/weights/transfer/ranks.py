"""Ranks that hold and want the tensors of a small manifest, each a thread in a communicator of Gloo."""

import threading

import torch

from millrace.errors import PublicationFailed
from millrace.weights.plans.layout import Layout, Place, row_major_strides
from millrace.weights.plans.manifest import Manifest, TensorInfo
from millrace.weights.plans.memory import Memory
from millrace.weights.transfer.channels.gloo import GlooChannel
from millrace.weights.transfer.store import serve_store

MANIFEST = Manifest(
    (
        TensorInfo("embed", (40, 16), "bfloat16"),
        TensorInfo("q", (32, 16), "bfloat16"),
        TensorInfo("k", (8, 16), "bfloat16"),
        TensorInfo("bias", (7,), "float32"),
        TensorInfo("scale", (), "bfloat16"),
    )
)


def values(seed=0):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(t.shape, generator=random).to(getattr(torch, t.dtype)) for t in MANIFEST.tensors]


def split(tensors, rank, ranks, dim=0):
    """Every tensor in equal parts along a dimension, in memory of float32 as an optimizer keeps it; small ones whole
    on every rank."""
    places, buffers = [], []
    for i, tensor in enumerate(tensors):
        offset, extent = [0] * tensor.dim(), list(tensor.shape)
        if tensor.dim() == 2:
            extent[dim] //= ranks
            offset[dim] = rank * extent[dim]
        part = tensor[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))]
        buffers.append(part.float().contiguous())
        places.append(Place(i, tuple(offset), tuple(extent), i, 0, row_major_strides(extent)))
    return Memory(MANIFEST, Layout.of(places, MANIFEST), buffers)


def fused(rank, ranks):
    """As an engine's worker has it: q and k of this worker below each other, a padded vocabulary, a tied copy."""
    q, k = 32 // ranks, 8 // ranks
    buffers = [torch.zeros(q + k, 16).bfloat16(), torch.zeros(48, 16).bfloat16(), torch.zeros(40, 16).bfloat16()]
    buffers += [torch.zeros(7), torch.zeros(()).bfloat16()]
    places = [
        Place(0, (0, 0), (40, 16), 1, 0, (16, 1)),
        Place(0, (0, 0), (40, 16), 2, 0, (16, 1)),
        Place(1, (rank * q, 0), (q, 16), 0, 0, (16, 1)),
        Place(2, (rank * k, 0), (k, 16), 0, q * 16, (16, 1)),
        Place(3, (0,), (7,), 3, 0, (1,)),
        Place(4, (), (), 4, 0, ()),
    ]
    return Memory(MANIFEST, Layout.of(places, MANIFEST), buffers)


def check(memory, rank, ranks, tensors):
    q, k = tensors[1].chunk(ranks)[rank], tensors[2].chunk(ranks)[rank]
    assert torch.equal(memory.buffers[0], torch.cat([q, k]))
    assert torch.equal(memory.buffers[1][:40], tensors[0]) and not memory.buffers[1][40:].any()
    assert torch.equal(memory.buffers[2], tensors[0])
    assert torch.equal(memory.buffers[3], tensors[3]) and torch.equal(memory.buffers[4], tensors[4])


class Ranks:
    """Every rank of a communicator in a thread of its own."""

    def __init__(self, world, key="job/1/1/0"):
        self.store, self.port = serve_store("127.0.0.1", world, 20.0)
        self.key, self.world = key, world
        self.failures = [None] * world
        self.channels = [None] * world

    def join(self, rank):
        store = self.store if rank == 0 else None
        self.channels[rank] = GlooChannel.join(
            "127.0.0.1", self.port, key=self.key, rank=rank, world_size=self.world, timeout_s=20.0, store=store
        )
        return self.channels[rank]

    def run(self, *work):
        def guarded(rank, job):
            try:
                job(self.join(rank))
            except PublicationFailed as error:
                self.failures[rank] = error

        threads = [threading.Thread(target=guarded, args=item) for item in enumerate(work)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        for channel in self.channels:
            if channel is not None:
                channel.close()

"""The plan: who sends which slice of which manifest tensor to whom, in order. Pure and torch-free.

Both sides compute it from what PREPARE told them and agree on its hash before anything is sent.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

from millrace.weights.plans.manifest import Manifest


@dataclass(frozen=True)
class Box:
    """A part of a manifest tensor: its index, and offset and extent in each dimension."""

    tensor: int
    offset: tuple[int, ...]
    extent: tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """`box` goes from rank `source` of the communicator to the ranks `targets`."""

    box: Box
    source: int
    targets: tuple[int, ...]


@dataclass(frozen=True)
class BroadcastPlan:
    manifest_hash: bytes
    transfers: tuple[Transfer, ...]

    @cached_property
    def hash(self) -> bytes:
        digest = hashlib.sha256(self.manifest_hash)
        for transfer in self.transfers:
            digest.update(repr(transfer).encode())
        return digest.digest()


def gather_broadcast(manifest: Manifest, world_size: int) -> BroadcastPlan:
    """Every tensor whole, in the manifest's order, from rank 0 to all others. The oracle for every other plan."""
    targets = tuple(range(1, world_size))
    boxes = (Box(i, (0,) * len(t.shape), t.shape) for i, t in enumerate(manifest.tensors))
    return BroadcastPlan(manifest.hash, tuple(Transfer(box, 0, targets) for box in boxes))

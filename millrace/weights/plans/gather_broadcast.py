"""The plan of gather-and-broadcast: every tensor whole, from one rank to all receivers. Torch-free.

Every member computes it from its PREPARE request, and they compare its hash before anything is sent. The hash covers
the `repr` of the transfers, so the classes' names are part of the protocol.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

from millrace.weights.plans.manifest import Manifest


@dataclass(frozen=True)
class Box:
    """A part of a manifest tensor: the tensor's index, and offset and extent in each dimension, in elements."""

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
    """All transfers, in the order in which they are made."""

    manifest_hash: bytes
    transfers: tuple[Transfer, ...]

    @cached_property
    def hash(self) -> bytes:
        digest = hashlib.sha256(self.manifest_hash)
        for transfer in self.transfers:
            digest.update(repr(transfer).encode())
        return digest.digest()


def gather_broadcast(manifest: Manifest, world_size: int) -> BroadcastPlan:
    """Every tensor, in the manifest's order, from rank 0 to all other ranks of the communicator."""
    targets = tuple(range(1, world_size))
    boxes = (Box(i, (0,) * len(t.shape), t.shape) for i, t in enumerate(manifest.tensors))
    return BroadcastPlan(manifest.hash, tuple(Transfer(box, 0, targets) for box in boxes))

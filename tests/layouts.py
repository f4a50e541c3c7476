"""Layouts and plans as tests and benchmarks need them: whole tensors, and what a sender packs."""

import numpy as np

from millrace.weights.plans.boxes import Ints
from millrace.weights.plans.layout import Layout, Place, row_major_strides
from millrace.weights.plans.manifest import Manifest
from millrace.weights.plans.sharded import ShardedPlan


def whole_layout(manifest: Manifest) -> Layout:
    """The layout of a rank that has every tensor whole and contiguous, each in a separate buffer."""
    return Layout.of(
        (
            Place(i, (0,) * len(t.shape), t.shape, i, 0, row_major_strides(t.shape))
            for i, t in enumerate(manifest.tensors)
        ),
        manifest,
    )


def packed_by(plan: ShardedPlan, rank: int) -> Ints:
    """Contents that a sender packs, each once; none for a receiver, which only passes contents on."""
    return np.unique(plan.hops[plan.hops[:, 1] == rank, 3]) if rank < plan.senders else np.zeros(0, np.int64)

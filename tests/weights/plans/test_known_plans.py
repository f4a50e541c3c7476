"""The plans of known layouts stay as they are: members of different builds of a release compare their hashes."""

import pytest

from millrace.weights.plans.boxes import Boxes
from millrace.weights.plans.layout import most_dims
from millrace.weights.plans.manifest import Manifest, TensorInfo
from millrace.weights.plans.sharded import plan
from tests.layouts import whole_layout

SHAPES = [((64, 48), "bfloat16"), ((96,), "float32"), ((32, 16, 8), "bfloat16")]
MANIFEST = Manifest(tuple(TensorInfo(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(SHAPES * 8)))


def part(number: int, parts: int, dim: int) -> Boxes:
    """One of `parts` equal parts of every tensor along its first dimension (0), or its last (-1)."""
    rows = []
    for i, tensor in enumerate(MANIFEST.tensors):
        offset, extent = [0] * len(tensor.shape), list(tensor.shape)
        offset[dim] = tensor.shape[dim] * number // parts
        extent[dim] = tensor.shape[dim] * (number + 1) // parts - offset[dim]
        rows.append((i, offset, extent))
    return Boxes.of(rows, most_dims(MANIFEST))


WHOLE = whole_layout(MANIFEST).boxes
PLANS = {
    "copies": ([WHOLE] * 3, [part(i, 2, 0) for i in range(2)], 4096, "d48f0bf2166e3bb4851239e54c0d92da"),
    "chain": ([WHOLE], [WHOLE] * 4, 8192, "f656aeddf9a9bf09a8469a34bc21c5f9"),
    "resharded": (
        [part(i, 3, 0) for i in range(3)] * 2,
        [part(i, 4, -1) for i in range(4)] * 2,
        2048,
        "4b85bb8a4260d88a463e935a4b0198e3",
    ),
    "overlapping": (
        [part(0, 2, 0), part(1, 2, 0), part(0, 3, -1)],
        [WHOLE, part(1, 4, 0)],
        1 << 20,
        "77c15fb4529d84721af22da7335bdcaa",
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_known_plan_keeps_its_hash(name: str) -> None:
    senders, receivers, message_bytes, known = PLANS[name]
    assert plan(MANIFEST, senders, receivers, message_bytes).hash.hex()[:32] == known

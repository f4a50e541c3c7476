import pytest

from millrace.weights.plans.gather_broadcast import gather_broadcast
from millrace.weights.plans.manifest import Manifest, TensorInfo

MANIFEST = Manifest((TensorInfo("a.weight", (4, 8), "bfloat16"), TensorInfo("b.bias", (3,), "float32")))


def test_manifest_survives_the_wire_and_a_changed_one_is_refused():
    proto = MANIFEST.to_proto()
    assert Manifest.from_proto(proto) == MANIFEST
    assert MANIFEST.bytes == 4 * 8 * 2 + 3 * 4
    proto.tensors[1].shape[0] = 4
    with pytest.raises(ValueError, match="hash"):
        Manifest.from_proto(proto)


def test_manifest_hash_sees_order_name_shape_and_dtype():
    a, b = MANIFEST.tensors
    others = [(b, a), (a,), (TensorInfo("a", a.shape, a.dtype), b), (TensorInfo(a.name, (8, 4), a.dtype), b)]
    others.append((TensorInfo(a.name, a.shape, "float16"), b))
    assert len({MANIFEST.hash, *(Manifest(t).hash for t in others)}) == 6


def test_gather_broadcast_sends_every_byte_once_to_every_receiver():
    plan = gather_broadcast(MANIFEST, world_size=3)
    assert [t.box.tensor for t in plan.transfers] == [0, 1]
    assert all(t.source == 0 and t.targets == (1, 2) for t in plan.transfers)
    assert [t.box.extent for t in plan.transfers] == [t.shape for t in MANIFEST.tensors]
    assert plan.hash != gather_broadcast(MANIFEST, world_size=2).hash


def test_the_hash_is_that_of_release_0_1():
    """Members of different releases compare hashes: a renamed class would make every publication fail."""
    assert gather_broadcast(MANIFEST, world_size=3).hash.hex()[:32] == "f1c620c0e2e5ed8e001ba424349ec41f"

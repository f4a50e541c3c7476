"""What a manifest says survives the wire, and another content is another manifest."""

import pytest

from millrace.contracts.v1 import weights_pb2
from millrace.weights.plans.manifest import Content, Manifest, TensorInfo

TENSORS = (TensorInfo("a.weight", (4, 8), "bfloat16"), TensorInfo("b.bias", (3,), "float32"))


@pytest.mark.parametrize("content", Content)
def test_a_manifest_keeps_its_content_on_the_wire(content: Content) -> None:
    manifest = Manifest(TENSORS, content)
    assert Manifest.from_proto(manifest.to_proto()) == manifest


def test_the_hash_tells_contents_apart() -> None:
    assert len({Manifest(TENSORS, content).hash for content in Content}) == len(Content)


def test_a_manifest_without_content_is_the_whole_model() -> None:
    proto = Manifest(TENSORS).to_proto()
    proto.ClearField("content")
    assert Manifest.from_proto(proto).content is Content.MODEL


def test_a_changed_content_contradicts_the_hash() -> None:
    proto = Manifest(TENSORS, Content.BASE).to_proto()
    proto.content = weights_pb2.CONTENT_ADAPTER
    with pytest.raises(ValueError, match="hash"):
        Manifest.from_proto(proto)

"""The boxes of the model folder's tensors that this rank holds, for publications that gather nothing."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from millrace.megatron.weights import Layout as Placements
from millrace.weights.plans.layout import Layout, Place, row_major_strides
from millrace.weights.plans.manifest import Manifest
from millrace.weights.plans.memory import Memory


def shards(
    chunks: Sequence[Mapping[str, Tensor]],
    placements: Placements,
    manifest: Manifest,
    merged: Sequence[Mapping[str, Callable[[], Tensor]]],
) -> Memory:
    """Views of the parameters that train, without a copy. `chunks` are this rank's parameters by name, and `merged` the
    weights among them that are computed when they are sent."""
    number = {tensor.name: i for i, tensor in enumerate(manifest.tensors)}
    places: list[Place] = []
    buffers: list[Tensor] = []
    computed: dict[int, Callable[[], Tensor]] = {}
    for tensors, placed, of_chunk in zip(chunks, placements, merged, strict=True):
        for name, placement in placed.items():
            strides = row_major_strides(placement.shape)
            for piece in placement.pieces:
                start = sum(t * s for t, s in zip(piece.target, strides, strict=True))
                where = Place(number[piece.tensor.name], piece.source, piece.extent, len(buffers), start, strides)
                places.append(where)
            if name in of_chunk:
                computed[len(buffers)] = of_chunk[name]
            buffers.append(tensors[name].detach())
    return Memory(manifest, Layout.of(places, manifest), buffers, computed)

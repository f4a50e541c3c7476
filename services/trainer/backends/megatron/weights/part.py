"""What is published: tensors of which every rank holds boxes in its parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from millrace.megatron.weights import Layout as Placements
from millrace.weights.plans.layout import Layout, Place, row_major_strides
from millrace.weights.plans.manifest import Content, Manifest, TensorInfo
from millrace.weights.plans.memory import Memory
from services.trainer.backends.megatron.weights.export import GatherPlan

ChunkTensors = Sequence[Mapping[str, Tensor]]
"""For each chunk of this rank its parameters and buffers by name."""


@dataclass
class PublishedPart:
    """Implements `services.trainer.protocol.adapter.Published`."""

    content: Content
    gather_plan: GatherPlan
    layout: Placements
    """Where this rank's parameters are in the tensors."""
    tensors: Callable[[], ChunkTensors]
    """The present values, in the same memory at every call."""
    device: torch.device
    merged: Sequence[Mapping[str, Callable[[], Tensor]]] = ()
    """For each chunk the weights that are published with their adapter, by name: each function computes one, float32.
    Empty where there is no adapter to merge."""
    _memory: dict[str, Memory] = field(default_factory=dict)
    """Keyed by dtype."""

    def manifest(self, dtype: str) -> Manifest:
        return self.gather_plan.manifest(dtype, self.content)

    def export(self, dtype: str) -> Iterator[tuple[TensorInfo, Tensor | None]]:
        present: ChunkTensors = self.tensors()
        if self.merged:
            present = [MergedTensors(*chunk) for chunk in zip(present, self.merged, strict=True)]
        return self.gather_plan.export(present, dtype, self.device)

    def shards(self, dtype: str) -> Memory:
        present = self.tensors()
        if dtype not in self._memory:
            self._memory[dtype] = shards(present, self.layout, self.manifest(dtype), self.merged or [{}] * len(present))
        return self._memory[dtype]


class MergedTensors(Mapping[str, Tensor]):
    """The tensors of a chunk by name, some of them computed. The one that was last asked for is kept, since all tensors
    of a fused weight are asked for one after the other."""

    def __init__(self, tensors: Mapping[str, Tensor], merged: Mapping[str, Callable[[], Tensor]]) -> None:
        self._tensors = tensors
        self._merged = merged
        self._last: tuple[str, Tensor] = ("", torch.empty(0))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._merged:
            return self._tensors[name]
        if self._last[0] != name:
            self._last = (name, self._merged[name]())
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


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

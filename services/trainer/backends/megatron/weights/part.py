"""What is published: tensors of which every rank holds boxes in its parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from millrace.megatron.weights import Layout
from millrace.weights.plans.manifest import Content, Manifest, TensorInfo
from millrace.weights.plans.memory import Memory
from services.trainer.backends.megatron.weights.export import GatherPlan
from services.trainer.backends.megatron.weights.shards import shards

ChunkTensors = Sequence[Mapping[str, Tensor]]
"""For each chunk of this rank its parameters and buffers by name."""


@dataclass
class PublishedPart:
    """Implements `services.trainer.protocol.published.Published`."""

    content: Content
    gather_plan: GatherPlan
    layout: Layout
    """Where this rank's parameters are in the tensors."""
    tensors: Callable[[], ChunkTensors]
    """The present values, in the same memory at every call where `shards` is used."""
    device: torch.device
    _memory: dict[str, Memory] = field(default_factory=dict)
    """Keyed by dtype."""

    def manifest(self, dtype: str) -> Manifest:
        return self.gather_plan.manifest(dtype, self.content)

    def export(self, dtype: str) -> Iterator[tuple[TensorInfo, Tensor | None]]:
        return self.gather_plan.export(self.tensors(), dtype, self.device)

    def shards(self, dtype: str) -> Memory:
        present = self.tensors()
        if dtype not in self._memory:
            self._memory[dtype] = shards(present, self.layout, self.manifest(dtype))
        return self._memory[dtype]

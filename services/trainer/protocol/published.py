"""What a rank of the trainer can publish: the whole model, the model without its adapter, or the adapter alone."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from millrace.weights.plans.manifest import Manifest, TensorInfo
from millrace.weights.plans.memory import Memory


class Published(Protocol):
    """The tensors of one `Content` on all ranks."""

    def manifest(self, dtype: str) -> Manifest:
        """Names, shapes and dtypes of the tensors that `export` yields, in its order."""

    def export(self, dtype: str) -> Iterator[tuple[TensorInfo, Tensor | None]]:
        """The tensors one after the other: whole on rank 0, on the backend's device; None on other ranks."""

    def shards(self, dtype: str) -> Memory | None:
        """The boxes of the manifest's tensors that this rank holds, as they are now. None where a tensor is not made of
        boxes of this rank's memory. A collective."""

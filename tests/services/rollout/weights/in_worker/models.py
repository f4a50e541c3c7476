"""A worker's model as small as it can be."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from millrace.weights.plans.manifest import Manifest


class LoaderModel:
    """A `WorkerModel` of parameters and the loader that writes them."""

    adapter = None

    def __init__(
        self,
        load: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
        parameters: Mapping[str, torch.Tensor],
        padded: frozenset[str] = frozenset(),
        rank: int = 0,
    ) -> None:
        self.load = load
        self.parameters = self.loaded = parameters
        self.padded = padded
        self.rank = rank

    def check(self, manifest: Manifest) -> None: ...

    def update_derived(self) -> None: ...

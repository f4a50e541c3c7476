"""Low-rank adapters (LoRA, arXiv 2106.09685; DoRA, arXiv 2402.09353): matrices that are trained in place of a weight.

The names are PEFT's: the weight of a layer X has the adapter X.lora_A and X.lora_B, and with DoRA
X.lora_magnitude_vector.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from millrace.weights.plans.manifest import Content, Manifest, TensorInfo
from millrace.weights.plans.memory import Memory


class Published(Protocol):
    """The tensors of one `Content` on all ranks."""

    def manifest(self, dtype: str) -> Manifest:
        """Names, shapes and dtypes of the tensors that `export` yields, in its order."""

    def export(self, dtype: str) -> Iterator[tuple[TensorInfo, Tensor | None]]:
        """The tensors one after the other: whole on rank 0, on the backend's device; None on other ranks."""

    def shards(self, dtype: str) -> Memory | None:
        """The boxes of the manifest's tensors that this rank holds, as they are now. None if a tensor is not made of
        boxes of this rank's memory. A collective."""


LORA_A, LORA_B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"
PEFT_PREFIX = "base_model.model."
"""Prefix of the tensors in a PEFT folder."""


@dataclass(frozen=True)
class AdapterSettings:
    """What determines how an adapter is added to its weight."""

    rank: int
    alpha: float
    rslora: bool
    dora: bool

    @property
    def scale(self) -> float:
        """Factor of the product of the two matrices: α/r, with rank stabilisation (arXiv 2312.03732) α/√r."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def to_json(self) -> dict[str, Any]:
        """The settings as they are written to a checkpoint's description."""
        return asdict(self)


class Adapter(Protocol):
    """The adapter of a loaded model."""

    settings: AdapterSettings
    config: Any
    """The `peft.LoraConfig` that describes the adapter."""
    parts: Mapping[Content, Published]
    """What can be published apart from the merged model: Content.BASE and Content.ADAPTER. Empty if the adapter can
    only be merged."""

    def export(self) -> Iterator[tuple[str, Tensor | None]]:
        """Every tensor of the adapter by its name in the module: whole on rank 0, float32, on the device; None on other
        ranks. A collective."""


def merged(weight_oi: Tensor, lora_a_ri: Tensor, lora_b_or: Tensor, scale: float, magnitude_o: Tensor | None) -> Tensor:
    """The weight that computes the same as the layer with its adapter, float32 [out, in]: W + s·B·A, with DoRA each row
    scaled to its magnitude."""
    total_oi: Tensor = weight_oi.float() + scale * (lora_b_or.float() @ lora_a_ri.float())
    if magnitude_o is None:
        return total_oi
    factor_o: Tensor = magnitude_o.float() / torch.linalg.vector_norm(total_oi, dim=1)
    return total_oi * factor_o[:, None]


def is_adapter(name: str) -> bool:
    """Whether the tensor of this name is one of an adapter's."""
    return any(f".{part}." in name for part in (LORA_A, LORA_B, MAGNITUDE))


def stored_name(name: str) -> str:
    """Name in a PEFT folder of an adapter's tensor, by its name in the module."""
    if f".{MAGNITUDE}." in name:
        return PEFT_PREFIX + name.removesuffix(".default.weight")
    return PEFT_PREFIX + name.replace(".default.", ".")


def tensor_name(layer: str, part: str) -> str:
    """Name in a PEFT module of the `part` (lora_A, lora_B, lora_magnitude_vector) of a layer's adapter."""
    return f"{layer}.{part}.default.weight"

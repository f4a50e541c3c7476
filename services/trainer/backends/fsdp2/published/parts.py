"""What is published of a model with an adapter if the two are not merged: the model once, then the adapter alone."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from millrace.weights.plans.manifest import Content, Manifest, TensorInfo
from millrace.weights.plans.memory import Memory
from services.trainer.backends.fsdp2.adapted import gathered, local
from services.trainer.backends.fsdp2.published import shards
from services.trainer.backends.fsdp2.published.shards import export, manifest
from services.trainer.protocol.adapter import LORA_B, AdapterSettings, Published, is_adapter, stored_name


def parts(module: nn.Module, settings: AdapterSettings, device: torch.device, rank: int) -> Mapping[Content, Published]:
    """See `Adapter.parts`. DoRA can only be merged."""
    if settings.dora:
        return {}
    return {
        Content.BASE: BasePart(module, device, rank),
        Content.ADAPTER: AdapterPart(module, settings.scale, device, rank),
    }


class BasePart:
    """The model's own tensors, which do not change. See `Published`."""

    def __init__(self, module: nn.Module, device: torch.device, rank: int) -> None:
        self._module = module
        self._device = device
        self._rank = rank

    def manifest(self, dtype: str) -> Manifest:
        return manifest(self._module, dtype, Content.BASE)

    def export(self, dtype: str) -> Iterator[tuple[TensorInfo, Tensor | None]]:
        for info, tensor in export(self._module, dtype, self._rank):
            yield info, None if tensor is None else tensor.to(self._device)

    def shards(self, dtype: str) -> Memory | None:
        return shards.shards(self._module, dtype, self._device, Content.BASE)


class AdapterPart:
    """The adapter's tensors under PEFT's stored names, B times the scale. See `Published`."""

    def __init__(self, module: nn.Module, scale: float, device: torch.device, rank: int) -> None:
        self._parameters = {stored_name(name): p for name, p in module.named_parameters() if is_adapter(name)}
        self._scale = scale
        self._device = device
        self._rank = rank
        self._copies: dict[str, Memory] = {}
        """Keyed by dtype. A copy, because what is published differs from what is trained by the scale."""

    def manifest(self, dtype: str) -> Manifest:
        infos = (TensorInfo(name, tuple(p.shape), dtype) for name, p in self._parameters.items())
        return Manifest(tuple(infos), Content.ADAPTER)

    def export(self, dtype: str) -> Iterator[tuple[TensorInfo, Tensor | None]]:
        for info, (name, parameter) in zip(self.manifest(dtype).tensors, self._parameters.items(), strict=True):
            whole = gathered(parameter)
            if self._rank == 0:
                yield info, self._scaled(name, whole).to(self._device, getattr(torch, dtype)).contiguous()
            else:
                yield info, None

    @torch.no_grad()
    def shards(self, dtype: str) -> Memory:
        """The next call overwrites the memory of this one."""
        if dtype not in self._copies:
            manifest = self.manifest(dtype)
            self._copies[dtype] = shards.copied_shards(manifest, list(self._parameters.values()), self._device)
        memory = self._copies[dtype]
        for buffer, (name, parameter) in zip(memory.buffers, self._parameters.items(), strict=True):
            buffer.copy_(self._scaled(name, local(parameter)))
        return memory

    def _scaled(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.detach() * self._scale if f".{LORA_B}." in name else tensor.detach()

"""What the fsdp2 backend publishes: the tensors of a sharded model under the names and in the parts that
save_pretrained would write, so that every loader of model folders can read them. They are gathered on rank 0, or left
as boxes that each rank holds; a model and an adapter that are not merged are published apart, the model once."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from millrace.weights.loader.stored import pieces, published_dtype, stored_boxes
from millrace.weights.plans.layout import Layout, Place, row_major_strides
from millrace.weights.plans.manifest import Content, Manifest, TensorInfo
from millrace.weights.plans.memory import Memory
from millrace.weights.plans.views import ViewedBox
from services.trainer.backends.fsdp2.adapted import (
    LayerAdapter,
    ModuleAdapter,
    folder_shapes,
    gathered,
    local,
    model_tensors,
)
from services.trainer.backends.fsdp2.loading import LocalPart
from services.trainer.protocol.adapter import LORA_B, AdapterSettings, Published, is_adapter, stored_name


def manifest(module: nn.Module, dtype: str, content: Content = Content.MODEL) -> Manifest:
    """The manifest of what `export` yields. It is computed from shapes, without communication and memory."""
    infos = []
    for name, stored in folder_shapes(module):
        kept = published_dtype(module, name, dtype)
        infos += [_info(piece, like, kept) for piece, like in stored.items()]
    return Manifest(tuple(infos), content)


def export(
    module: nn.Module, dtype: str, rank: int, adapter: ModuleAdapter | None = None
) -> Iterator[tuple[TensorInfo, Tensor | None]]:
    """Every tensor, with its adapter added, whole and contiguous on rank 0, in `dtype`; None on the other ranks, which
    take part in the gathering. Each rank adds the adapter to the rows that it has. A collective."""
    for name, tensor, layer in model_tensors(module):
        kept = published_dtype(module, name, dtype)
        if layer is not None and adapter is not None:
            rows = layer.merged(tensor, gathered(layer.lora_a_ri), adapter.settings.scale)
            tensor = _like(tensor, rows.to(getattr(torch, kept)))
        whole = gathered(tensor)
        if rank != 0:
            whole = torch.empty(whole.shape, device="meta")
        for piece, values in pieces(module, name, whole).items():
            info = _info(piece, values, kept)
            yield info, values.to(getattr(torch, kept)).contiguous() if rank == 0 else None


def _like(tensor: Tensor, part: Tensor) -> Tensor:
    """A tensor of which this rank has `part` if it has its part of `tensor`."""
    if not isinstance(tensor, DTensor):
        return part
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(part, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride)


def _info(name: str, tensor: Tensor, dtype: str) -> TensorInfo:
    return TensorInfo(name, tuple(tensor.shape), dtype)


class MergedLayers:
    """The layers with an adapter, of which merged weights are published. A rank merges the rows that it has, and needs
    the whole of each matrix A for that."""

    def __init__(self, scale: float, device: torch.device) -> None:
        """`device`: where the merged weights are computed."""
        self._scale = scale
        self._device = device
        self._layers: dict[int, tuple[LayerAdapter, Tensor]] = {}
        """The adapter of a layer and the memory for its whole A, by the id of A's parameter."""

    def weight(self, weight_oi: Tensor, layer: LayerAdapter) -> Callable[[], Tensor]:
        """Computes this rank's rows of the layer's weight with its adapter, float32."""
        key, whole = id(layer.lora_a_ri), torch.empty(layer.lora_a_ri.shape, device=self._device)
        _, lora_a_ri = self._layers.setdefault(key, (layer, whole))
        return lambda: layer.merged(weight_oi.detach(), lora_a_ri, self._scale).detach()

    @torch.no_grad()
    def refresh(self) -> None:
        """Gathers every A as it is now. A collective."""
        for layer, lora_a_ri in self._layers.values():
            lora_a_ri.copy_(gathered(layer.lora_a_ri))


def shards(
    module: nn.Module,
    dtype: str,
    device: torch.device,
    content: Content = Content.MODEL,
    merging: MergedLayers | None = None,
) -> Memory | None:
    """Views of the shards of the model's own tensors, without a copy, to be sent from `device`: shards in host memory
    stay there, and only messages are on the device. With `merging`, the weights that have an adapter are computed when
    they are sent. None if a tensor of the model folder is not made of boxes of the model's parameters."""
    published = manifest(module, dtype, content)
    number = {tensor.name: i for i, tensor in enumerate(published.tensors)}
    places: list[Place] = []
    buffers: list[Tensor] = []
    computed: dict[int, Callable[[], Tensor]] = {}
    for name, tensor, layer in model_tensors(module):
        if (found := stored_boxes(module, name, tensor.shape)) is None:
            return None
        places += _places(tensor, {number[piece]: stored for piece, stored in found.items()}, len(buffers))
        if layer is not None and merging is not None:
            computed[len(buffers)] = merging.weight(tensor, layer)
        buffers.append(local(tensor).detach())
    return Memory(published, Layout.of(places, published), buffers, computed, message_device=device)


def copied_shards(published: Manifest, tensors: Sequence[Tensor], device: torch.device) -> Memory:
    """Memory on `device` for a copy of this rank's shards of `tensors`, in the manifest's dtypes; it is not filled. The
    manifest has one tensor for each of `tensors`."""
    places: list[Place] = []
    buffers: list[Tensor] = []
    for number, (info, tensor) in enumerate(zip(published.tensors, tensors, strict=True)):
        part = LocalPart.of(tensor)
        extents = tuple(part.values.shape)
        places.append(Place(number, part.offset, extents, number, 0, row_major_strides(extents)))
        buffers.append(torch.empty(extents, dtype=getattr(torch, info.dtype), device=device))
    return Memory(published, Layout.of(places, published), buffers)


def _places(tensor: Tensor, pieces: Mapping[int, tuple[ViewedBox, tuple[int, ...]]], buffer: int) -> Iterator[Place]:
    """The parts of each stored tensor that are in this rank's part of the parameter."""
    part = LocalPart.of(tensor)
    extents, offsets = tuple(part.values.shape), part.offset
    strides = tuple(part.values.stride())
    for number, (piece, shape) in pieces.items():
        low = [max(a, b) for a, b in zip(piece.offset, offsets, strict=True)]
        high = [min(a + n, b + m) for a, n, b, m in zip(piece.offset, piece.extent, offsets, extents, strict=True)]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            continue
        start = sum((a - b) * s for a, b, s in zip(low, offsets, strides, strict=True))
        dims = [piece.along.index(view) if view in piece.along else None for view in range(len(shape))]
        yield Place(
            number,
            tuple(0 if d is None else low[d] - piece.offset[d] for d in dims),
            tuple(1 if d is None else high[d] - low[d] for d in dims),
            buffer,
            start,
            tuple(0 if d is None else strides[d] for d in dims),
        )


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
        return shards(self._module, dtype, self._device, Content.BASE)


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
            self._copies[dtype] = copied_shards(manifest, list(self._parameters.values()), self._device)
        memory = self._copies[dtype]
        for buffer, (name, parameter) in zip(memory.buffers, self._parameters.items(), strict=True):
            buffer.copy_(self._scaled(name, local(parameter)))
        return memory

    def _scaled(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.detach() * self._scale if f".{LORA_B}." in name else tensor.detach()

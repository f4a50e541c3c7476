"""The tensors of a sharded model under the names and in the parts that save_pretrained would write, so that every
loader of model folders can read them."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from millrace.weights.loader.stored import pieces, published_dtype
from millrace.weights.plans.manifest import Content, Manifest, TensorInfo
from services.trainer.backends.fsdp2.adapted import ModuleAdapter, gathered, model_tensors


def manifest(module: nn.Module, dtype: str, content: Content = Content.MODEL) -> Manifest:
    """The manifest of what `export` yields. It is computed from shapes, without communication and memory."""
    infos = []
    for name, tensor, _ in model_tensors(module):
        whole = torch.empty(tensor.shape, device="meta")
        kept = published_dtype(module, name, dtype)
        infos += [_info(piece, shape, kept) for piece, shape in pieces(module, name, whole).items()]
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
    """A tensor of which this rank has `part` where it has its part of `tensor`."""
    if not isinstance(tensor, DTensor):
        return part
    shape, stride = tensor.shape, tensor.stride()
    return DTensor.from_local(part, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride)


def _info(name: str, tensor: Tensor, dtype: str) -> TensorInfo:
    return TensorInfo(name, tuple(tensor.shape), dtype)

"""The tensors of a sharded model under the names and in the parts that save_pretrained would write, so that every
loader of model folders can read them."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

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
    take part in the gathering. A collective."""
    for name, tensor, layer in model_tensors(module):
        whole = gathered(tensor)
        if layer is not None and adapter is not None:
            whole = layer.merged(whole, adapter.settings.scale)
        if rank != 0:
            whole = torch.empty(whole.shape, device="meta")
        kept = published_dtype(module, name, dtype)
        for piece, values in pieces(module, name, whole).items():
            info = _info(piece, values, kept)
            yield info, values.to(getattr(torch, kept)).contiguous() if rank == 0 else None


def _info(name: str, tensor: Tensor, dtype: str) -> TensorInfo:
    return TensorInfo(name, tuple(tensor.shape), dtype)

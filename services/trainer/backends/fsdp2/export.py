"""A sharded model in Hugging Face terms, tensor by tensor: under the names and in the pieces that save_pretrained
would write, so that every loader that reads model folders takes them."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from millrace.weights.manifest import Manifest, TensorInfo
from services.trainer.backends.fsdp2.model import stored_tensors


def manifest(module: nn.Module, dtype: str) -> Manifest:
    """What `export` gives. Needs no communication and no memory: the pieces are worked out on shapes."""
    infos = []
    for name, tensor in stored_tensors(module):
        whole = torch.empty(tensor.shape, device="meta")
        infos += [_info(piece, shape, dtype) for piece, shape in _pieces(module, name, whole).items()]
    return Manifest(tuple(infos))


def export(module: nn.Module, dtype: str, rank: int) -> Iterator[tuple[TensorInfo, Tensor | None]]:
    """Every tensor whole on rank 0, contiguous, in `dtype`; None on the others, which gather with it."""
    for name, tensor in stored_tensors(module):
        whole = _whole(tensor)
        if rank != 0:
            whole = torch.empty(whole.shape, device="meta")
        for piece, values in _pieces(module, name, whole).items():
            info = _info(piece, values, dtype)
            yield info, values.to(getattr(torch, dtype)).contiguous() if rank == 0 else None


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _info(name: str, tensor: Tensor, dtype: str) -> TensorInfo:
    return TensorInfo(name, tuple(tensor.shape), dtype)


def _pieces(module: nn.Module, name: str, whole: Tensor) -> dict[str, Tensor]:
    """transformers keeps some tensors fused (all experts of a layer); a model folder has them one by one."""
    if not isinstance(module, PreTrainedModel):
        return {name: whole}
    return revert_weight_conversion(module, {name: whole})

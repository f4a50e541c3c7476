"""Reads a model folder's safetensors straight into the shards of a module: each rank only the boxes that it holds."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from millrace.weights.folder_tensors import Unread
from millrace.weights.loader.stored import stored_tensors, views
from millrace.weights.plans.views import ViewedBox, viewed_box
from services.trainer.backends.fsdp2.adapted import BASE
from services.trainer.checkpoints.huggingface import layer_count
from services.trainer.checkpoints.model_files import ModelFiles, check_unread
from services.trainer.protocol.adapter import is_adapter


@dataclass(frozen=True)
class StoredBox:
    """A tensor of the folder, and the box of a module's tensor that it is."""

    stored: str
    target: Tensor
    box: ViewedBox


def folder_tensors(module: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The module's tensors that a folder stores, by their names without adapters. Tied weights come once."""
    for name, tensor in stored_tensors(module):
        if not is_adapter(name):
            yield name.replace(BASE, "."), tensor


def tied_names(module: PreTrainedModel) -> dict[str, str]:
    """Names of parameters that are tied to others, with the names under which these are read; without adapters."""
    read = {id(tensor): name for name, tensor in module.named_parameters()}
    named = module.named_parameters(remove_duplicate=False)
    tied = {name: read[id(tensor)] for name, tensor in named if read[id(tensor)] != name}
    return {name.replace(BASE, "."): source.replace(BASE, ".") for name, source in tied.items()}


def check_whole_folder(module: PreTrainedModel, files: ModelFiles, folder: Path, place: str, *, by_value: bool) -> None:
    """Raises InvalidJob if the folder stores tensors with values of their own that the module does not take.
    `by_value`: tied ones are compared with the one that is read for them; otherwise names and shapes alone count.

    A module without a head ignores the folder's: tensors outside the module's own prefix."""
    if (found := boxes(module, files)) is None:
        return
    taken, prefix = {each.stored for each in found}, module.base_model_prefix
    ignored = list(module._keys_to_ignore_on_load_unexpected or ())
    if all(name.startswith(f"{prefix}.") for name in taken) and not hasattr(module, prefix):
        ignored.append(rf"^(?!{re.escape(prefix)}\.)")
    stored = {piece: _name_in(files, piece, prefix) for pair in tied_names(module).items() for piece in pair}
    tied = {str(stored[name]): str(stored[source]) for name, source in tied_names(module).items() if stored[name]}
    unread = Unread.of(files, taken, tied=tied, ignored=ignored, layers=layer_count(folder))
    check_unread(unread, files, folder, place, by_value=by_value)


def boxes(module: PreTrainedModel, files: ModelFiles) -> list[StoredBox] | None:
    """Where each tensor of the folder belongs. None if one is not a box of a tensor of the module, or is stored
    under an older name or in another shape: transformers has to convert such a folder."""
    found: list[StoredBox] = []
    for name, target in folder_tensors(module):
        whole = torch.empty(target.shape, device="meta")
        if (pieces := views(module, name, whole)) is None:
            return None
        for piece, view in pieces.items():
            box = viewed_box(whole.shape, (int(view.storage_offset()), tuple(view.shape), tuple(view.stride())))
            stored = _name_in(files, piece, module.base_model_prefix)
            if box is None or stored is None or tuple(files.tensor(stored).get_shape()) != tuple(view.shape):
                return None
            found.append(StoredBox(stored, target, box))
    return found


def _name_in(files: ModelFiles, name: str, prefix: str) -> str | None:
    """The tensor's name in a folder that was written by this model, by the model with a head, by the one without, or by
    a model that has towers beside its language model."""
    inner = name.removeprefix(f"{prefix}.")
    names = (name, f"{prefix}.{name}", inner, f"{prefix}.language_model.{inner}")
    return next((each for each in names if files.has(each)), None)


@torch.no_grad()
def fill(found: list[StoredBox], files: ModelFiles) -> None:
    """Reads this rank's part of each tensor. Not a collective. Raises InvalidJob, SafetensorError, OSError."""
    for each in found:
        part = LocalPart.of(each.target)
        low = [max(a, b) for a, b in zip(part.offset, each.box.offset, strict=True)]
        high = [
            min(a + n, b + m)
            for a, n, b, m in zip(part.offset, part.values.shape, each.box.offset, each.box.extent, strict=True)
        ]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            continue
        here = part.values[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, part.offset, strict=True))]
        here.copy_(_read(each, files, low, high).reshape(here.shape))


def _read(each: StoredBox, files: ModelFiles, low: list[int], high: list[int]) -> Tensor:
    """The elements of the stored tensor that are in the box from `low` to `high` of the module's tensor, with the
    module's order of dimensions; dimensions of one element may be missing."""
    stored = files.tensor(each.stored)
    dims: int = len(stored.get_shape())
    if dims == 0:
        return files.whole(each.stored)
    slices = [slice(0, 1)] * dims
    for dim, along in enumerate(each.box.along):
        if along is not None:
            start = each.box.offset[dim]
            slices[along] = slice(low[dim] - start, high[dim] - start)
    values: Tensor = stored[tuple(slices)]
    order = [along for along in each.box.along if along is not None]
    return values.permute(*order, *(dim for dim in range(dims) if dim not in order))


@dataclass(frozen=True)
class LocalPart:
    """The box of a tensor that this rank holds."""

    values: Tensor
    offset: tuple[int, ...]
    """First index of the box in the tensor, in each dimension."""

    @classmethod
    def of(cls, tensor: Tensor) -> "LocalPart":
        if not isinstance(tensor, DTensor):
            return cls(tensor.detach(), (0,) * tensor.dim())
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return cls(tensor.to_local().detach(), tuple(offset))

    @torch.no_grad()
    def copy_from(self, whole: Tensor) -> None:
        """Takes this rank's box of a tensor that is whole here."""
        box = tuple(slice(o, o + n) for o, n in zip(self.offset, self.values.shape, strict=True))
        self.values.copy_(whole[box])

"""Reads a model folder: only the boxes that this rank holds."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from millrace.megatron.architectures.shape import ModelShape, Names
from millrace.megatron.placement import Placement
from millrace.megatron.weights import unread
from services.trainer.checkpoints.model_files import ModelFiles
from services.trainer.checkpoints.unread import check_unread

VALUE_HEAD = Names().value_head


def check_whole_folder(folder: Path, shape: ModelShape, weights: Path | None, *, by_value: bool) -> None:
    """Raises InvalidJob where the folder stores tensors with values of their own that the model does not take.
    `by_value`: tied ones are compared with those that are read for them."""
    field = "algorithm.critic.path" if shape.value_head else "model.path"
    place = f"{field}: {folder}" if weights is None else f"model.weights: {weights}"
    with ModelFiles(folder, weights) as files:
        check_unread(unread(shape, files), files, folder, place, by_value=by_value)


def read(
    folder: Path, layout: Mapping[str, Placement], dtype: torch.dtype, weights: Path | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Each parameter of the layout with the values of the folder, or of its checkpoint `weights`, in host memory, one
    at a time. Padding is 0, and so is a value head that the folder does not have.

    Raises InvalidJob where a tensor is missing or has another shape than the config promises.
    """
    with ModelFiles(folder, weights) as files:
        for name, placement in layout.items():
            parameter = torch.zeros(placement.shape, dtype=dtype)
            for piece in placement.pieces:
                if piece.tensor.name == VALUE_HEAD and not files.has(VALUE_HEAD):
                    continue
                stored = files.slice_of(piece.tensor.name, piece.tensor.shape)
                box = tuple(slice(o, o + n) for o, n in zip(piece.source, piece.extent, strict=True))
                target = tuple(slice(o, o + n) for o, n in zip(piece.target, piece.extent, strict=True))
                parameter[target] = stored[box].to(dtype)
            yield name, parameter

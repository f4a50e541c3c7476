"""The tensors of a model folder, read from a distributed checkpoint of another program."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import EllipsisType

import torch
from torch import Tensor

from millrace.checkpoints.index import CheckpointIndex, Located, Part, read_index
from millrace.checkpoints.source import is_megatron, located
from services.trainer.checkpoints.box_files import DTYPES
from services.trainer.checkpoints.foreign.chunks import ChunkReader

Index = EllipsisType | slice | tuple[slice, ...]
FLOAT8 = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}


class CheckpointTensor:
    """A tensor with the interface of a safetensors slice: indexing it reads only what is asked for."""

    def __init__(self, tensor: Located, index: CheckpointIndex, reader: ChunkReader) -> None:
        self._tensor = tensor
        self._index = index
        self._reader = reader

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """The name that safetensors has for the dtype."""
        dtype = getattr(torch, self._tensor.dtype)
        return {**DTYPES, **FLOAT8}.get(dtype, self._tensor.dtype)

    def __getitem__(self, index: Index) -> Tensor:
        """The elements in a box. `index` has a slice with step 1 for each of the first dimensions. Raises
        InvalidJob."""
        shape = self._tensor.shape
        given = () if index is ... else index if isinstance(index, tuple) else (index,)
        asked = [*given, *(slice(None) for _ in shape[len(given) :])]
        box = [slice(*part.indices(n)[:2]) for part, n in zip(asked, shape, strict=True)]
        low, high = [part.start for part in box], [max(part.start, part.stop) for part in box]
        found = torch.empty([b - a for a, b in zip(low, high, strict=True)], dtype=getattr(torch, self._tensor.dtype))
        if not found.numel():
            return found
        for part in self._tensor.parts:
            first = [max(a, o) for a, o in zip(low, part.offset, strict=True)]
            end = [min(b, o + n) for b, o, n in zip(high, part.offset, part.extent, strict=True)]
            if all(a < b for a, b in zip(first, end, strict=True)):
                here = found[tuple(slice(a - o, b - o) for a, b, o in zip(first, end, low, strict=True))]
                here.copy_(self._read(part, first, end).reshape(here.shape))
        return found

    def _read(self, part: Part, first: Sequence[int], end: Sequence[int]) -> Tensor:
        """A box of the tensor inside of a part. Dimensions of one element may be missing."""
        low, high = list(part.stored), [at + 1 for at in part.stored]
        for dim, along in enumerate(part.along):
            if along is not None:
                low[dim] += first[along] - part.offset[along]
                high[dim] = low[dim] + end[along] - first[along]
        values = self._reader.read(self._index.tensors[part.key], low, high)
        dims = range(len(low))
        lasting = sorted((along, dim) for dim, along in enumerate(part.along) if along is not None)
        order = [dim for _, dim in lasting]
        return values.permute(*order, *(dim for dim in dims if dim not in order)) if low else values


class CheckpointFiles:
    """Implements `services.trainer.checkpoints.model_files.Source`."""

    def __init__(self, folder: Path, checkpoint: Path, field: str) -> None:
        """`folder` has the config of the model in `checkpoint`. Raises InvalidJob where that cannot be read."""
        self._folder = folder
        self._index = read_index(checkpoint, field)
        self._located = located(self._index, folder)
        self._megatron = is_megatron(checkpoint, field)
        self._reader = ChunkReader(checkpoint, field)

    @cached_property
    def _by_folder_names(self) -> Mapping[str, Located]:
        """The tensors under the names of a model folder."""
        from services.trainer.checkpoints.foreign.module_names import by_folder_names, empty_module

        if self._megatron:
            return {}
        try:
            module = empty_module(self._folder)
        except (OSError, ValueError, KeyError, ImportError):
            return {}  # a model that transformers does not know has the names of its folder
        return {} if module is None else by_folder_names(module, self._located)

    def names(self) -> Iterator[str]:
        pieces = self._by_folder_names
        split = {part.key for each in pieces.values() for part in each.parts}
        yield from pieces
        for name, tensor in self._located.items():
            if name not in pieces and split.isdisjoint(part.key for part in tensor.parts):
                yield name

    def __contains__(self, name: str) -> bool:
        return name in self._located or name in self._by_folder_names

    def stored(self, name: str) -> CheckpointTensor:
        found = self._located.get(name) or self._by_folder_names[name]
        return CheckpointTensor(found, self._index, self._reader)

    def whole(self, name: str) -> Tensor:
        return self.stored(name)[...]

    def close(self) -> None:
        self._reader.close()

"""The tensors of a model folder, read from a distributed checkpoint of another program: of each file only the bytes
between a box's first and last number."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from types import EllipsisType
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.utils import _create_file_view

from millrace.checkpoints.index import CheckpointIndex, Chunk, Located, Part, StoredTensor, read_index
from millrace.checkpoints.source import is_megatron, located
from millrace.errors import InvalidJob, refused
from services.trainer.checkpoints.box_files import DTYPES

MOST_OPEN = 64
"""Files that are open at the same time: a checkpoint may have as many as ranks wrote it."""


@dataclass(frozen=True)
class _Values:
    """Where the numbers of a chunk are in its file."""

    dtype: torch.dtype
    first_byte: int
    strides: tuple[int, ...]


class ChunkReader:
    """Reads from the files of a checkpoint, which it closes with `close`."""

    def __init__(self, folder: Path, field: str) -> None:
        self._folder = folder
        self._field = field
        self._files: dict[str, BinaryIO] = {}
        self._stack = ExitStack()
        self._values: dict[Chunk, _Values] = {}

    def close(self) -> None:
        self._files.clear()
        self._stack.close()

    def read(self, tensor: StoredTensor, low: Sequence[int], high: Sequence[int]) -> Tensor:
        """The box from `low` to `high`, in host memory, in the stored dtype. Raises InvalidJob if a part of it is in
        no file, or a file is damaged."""
        found = torch.empty([b - a for a, b in zip(low, high, strict=True)], dtype=getattr(torch, tensor.dtype))
        missing = found.numel()
        for chunk in tensor.chunks_in(low, high):
            first = [max(a, o) for a, o in zip(low, chunk.offset, strict=True)]
            end = [min(b, o + n) for b, o, n in zip(high, chunk.offset, chunk.extent, strict=True)]
            here = found[tuple(slice(a - o, b - o) for a, b, o in zip(first, end, low, strict=True))]
            here.copy_(self._box(tensor, chunk, first, end))
            missing -= here.numel()
        if missing > 0:
            reason = f"{missing} numbers of {tensor.key} from {list(low)} to {list(high)} are in none of its files"
            raise refused(self._field, str(self._folder), reason, "give a complete checkpoint.")
        return found

    def _box(self, tensor: StoredTensor, chunk: Chunk, first: list[int], end: list[int]) -> Tensor:
        """The part of a chunk in a box of the tensor."""
        values = self._values_of(tensor, chunk)
        extent = [b - a for a, b in zip(first, end, strict=True)]
        inside = [a - o for a, o in zip(first, chunk.offset, strict=True)]
        begin = sum(at * stride for at, stride in zip(inside, values.strides, strict=True))
        count = 1 + sum((n - 1) * stride for n, stride in zip(extent, values.strides, strict=True))
        size = values.dtype.itemsize
        buffer = bytearray(count * size)
        file = self._file(chunk.file)
        file.seek(values.first_byte + begin * size)
        if file.readinto(buffer) != len(buffer):  # type: ignore[attr-defined]
            raise self._damaged(tensor, chunk, "it ends too early")
        return torch.frombuffer(buffer, dtype=values.dtype).as_strided(extent, values.strides)

    def _values_of(self, tensor: StoredTensor, chunk: Chunk) -> _Values:
        if chunk not in self._values:
            self._values[chunk] = self._found_values(tensor, chunk)
        return self._values[chunk]

    def _found_values(self, tensor: StoredTensor, chunk: Chunk) -> _Values:
        """Where torch.save put the numbers. On the meta device torch reads no number, and tells where they begin."""
        view: Any = _create_file_view(self._file(chunk.file), chunk.start, chunk.length)  # type: ignore[arg-type]
        try:
            stored = torch.load(view, map_location="meta", weights_only=True)
        except (RuntimeError, UnpicklingError, OSError, EOFError, ValueError, KeyError) as error:
            raise self._damaged(tensor, chunk, " ".join(str(error).split())[:200]) from error
        if not isinstance(stored, Tensor) or tuple(stored.shape) != chunk.extent:
            raise self._damaged(tensor, chunk, "it does not hold what the index says")
        offset = stored.untyped_storage()._checkpoint_offset
        assert offset is not None
        first = chunk.start + offset + int(stored.storage_offset()) * stored.element_size()
        return _Values(stored.dtype, first, stored.stride())

    def _file(self, name: str) -> BinaryIO:
        if name not in self._files:
            if len(self._files) >= MOST_OPEN:
                self.close()
            try:
                self._files[name] = self._stack.enter_context((self._folder / name).open("rb", buffering=0))
            except OSError as error:
                reason = f"{name} cannot be read: {error.strerror}"
                fix = "give a checkpoint that every trainer host sees at this path."
                raise refused(self._field, str(self._folder), reason, fix) from error
        return self._files[name]

    def _damaged(self, tensor: StoredTensor, chunk: Chunk, why: str) -> InvalidJob:
        reason = f"{tensor.key} cannot be read from byte {chunk.start} of {chunk.file}: {why}"
        return refused(self._field, str(self._folder), reason, "write or copy the checkpoint again.")


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
        """`folder` has the config of the model in `checkpoint`. Raises InvalidJob if that cannot be read."""
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

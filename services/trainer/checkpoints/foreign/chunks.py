"""Reads boxes of the tensors of a distributed checkpoint: of each file only the bytes between a box's first and last
number."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.utils import _create_file_view

from millrace.checkpoints.index import Chunk, StoredTensor
from millrace.errors import InvalidJob, refused

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
        """The box from `low` to `high`, in host memory, in the stored dtype. Raises InvalidJob where a part of it is in
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

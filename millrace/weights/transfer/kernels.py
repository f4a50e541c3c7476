"""A round's copies and checksums on a GPU: one launch each, through CuPy. The code is in kernels.cu."""

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from millrace.weights.plans.memory import PieceInMessage
from millrace.weights.transfer.checksum import mixed

log = structlog.get_logger(__name__)
UNITS, THREADS, FIELDS = 2048, 256, 12
CONVERT, CONVERT4 = 100, 101
PACK, UNPACK, COMPARE = 0, 1, 2
SUM_BLOCKS = 64
"""For each message."""
PIECES_BLOCKS = 4096
"""For all pieces, of which each block sums several tiles."""


@functools.cache
def supported() -> bool:
    """Whether CuPy is here and compiles them. Without, torch copies piece by piece, which is slow for many."""
    try:
        from cupy.cuda.compiler import CompileException
    except ImportError as error:
        log.warning("CuPy is not installed: weights are copied piece by piece", error=str(error))
        return False
    try:
        _module()
    except (OSError, RuntimeError, CompileException) as error:
        log.warning("CuPy compiles nothing here: weights are copied piece by piece", error=str(error))
        return False
    return True


@functools.cache
def _module() -> Any:
    import cupy

    source = Path(__file__).with_name("kernels.cu").read_text()
    module = cupy.RawModule(code=source, options=("-std=c++17",))
    module.get_function("move")
    return module


class CudaRoundOperations:
    """See `batch.Batch`. What the kernel does not know (other conversions, five dimensions) goes through torch."""

    def __init__(
        self, pairs: Sequence[PieceInMessage], messages: Mapping[int, torch.Tensor], device: torch.device
    ) -> None:
        rows = [described(pair) for pair in pairs]
        self._others = [pair for pair, row in zip(pairs, rows, strict=True) if row is None]
        self._kept = (pairs, messages)  # their memory is named by address only
        known = np.array([row for row in rows if row is not None], np.int64).reshape(-1, FIELDS)
        self._pieces = torch.from_numpy(known).to(device)
        self._tiles = torch.from_numpy(tiled(known)).to(device)
        words = [(m.data_ptr(), m.numel() // 16) for m in messages.values()]
        self._messages = torch.tensor(words, dtype=torch.int64).reshape(-1, 2).to(device)
        self._numbers = list(messages)
        self._bytes = [m.numel() for m in messages.values()]
        self._sums = torch.zeros(len(messages), 2, dtype=torch.int64, device=device)
        self._wrong = torch.zeros(1, dtype=torch.int32, device=device)
        self._base = min((pair.wire.data_ptr() for pair in pairs), default=0)
        self._noted, self._found = torch.zeros(2, 2, dtype=torch.int64, device=device)

    def pack(self) -> None:
        self._move(PACK)
        for pair in self._others:
            pair.wire.copy_(pair.lies)

    def unpack(self) -> None:
        self._move(UNPACK)
        for pair in self._others:
            pair.lies.copy_(pair.wire)

    def compare(self) -> None:
        self._move(COMPARE)
        self._compare_others()

    def note(self) -> None:
        self._sum_pieces(self._noted, wired=True)

    def check(self) -> None:
        self._sum_pieces(self._found, wired=False)
        self._wrong += (self._found != self._noted).any().int()
        self._compare_others()

    def _compare_others(self) -> None:
        for pair in self._others:
            self._wrong += (pair.lies != pair.wire).any().int()

    def _sum_pieces(self, into: torch.Tensor, *, wired: bool) -> None:
        into.zero_()
        if count := len(self._tiles):
            arguments = (self._pieces, self._tiles, np.int64(count), np.int32(wired), np.int64(self._base), into)
            self._launch("pieces_sum", (min(count, PIECES_BLOCKS),), arguments)

    def sum(self) -> None:
        self._sums.zero_()
        if self._numbers:
            grid = (SUM_BLOCKS, len(self._numbers))
            self._launch("sums", grid, (self._messages, self._sums))

    @staticmethod
    def read_sums(batches: Sequence["CudaRoundOperations"]) -> Mapping[int, int]:
        numbers = [number for done in batches for number in done._numbers]
        sizes = [size for done in batches for size in done._bytes]
        told = torch.cat([done._sums for done in batches]).tolist()
        columns = zip(numbers, told, sizes, strict=True)
        return {n: mixed(plain, weighted, size) for n, (plain, weighted), size in columns}

    @staticmethod
    def read_differing(batches: Sequence["CudaRoundOperations"]) -> list[int]:
        found: list[int] = torch.cat([done._wrong for done in batches]).tolist()
        for done, count in zip(batches, found, strict=True):
            if count:
                done._wrong.zero_()
        return found

    def _move(self, mode: int) -> None:
        if len(self._tiles):
            self._launch("move", (len(self._tiles),), (self._pieces, self._tiles, np.int32(mode), self._wrong))

    def _launch(self, name: str, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        import cupy

        packed = tuple(np.uint64(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments)
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            _module().get_function(name)(grid, (THREADS,), packed)


def described(pair: PieceInMessage) -> list[int] | None:
    """A piece as the kernel reads it. None where it cannot."""
    lies, wire = pair.lies, pair.wire
    dims = _merged(lies.shape, lies.stride())
    if len(dims) > 4:
        return None
    addresses = (lies.data_ptr(), wire.data_ptr())
    if lies.dtype != wire.dtype:
        if (lies.dtype, wire.dtype) != (torch.float32, torch.bfloat16):
            return None
        kind = CONVERT4 if _divides(4, dims) and addresses[0] % 16 == 0 and addresses[1] % 8 == 0 else CONVERT
        dims = _wider(dims, 4 if kind == CONVERT4 else 1)
    else:
        item = lies.element_size()
        many = next(m for m in (16 // item, 8 // item, 4 // item, 2 // item, 1) if _fits(m, item, dims, addresses))
        kind, dims = many * item, _wider(dims, many)
    dims = [(1, 0)] * (4 - len(dims)) + dims
    units = math.prod(extent for extent, _ in dims)
    if units >= 1 << 32:
        return None
    extents, strides = [extent for extent, _ in dims], [stride for _, stride in dims]
    return [*addresses, units, kind, *extents[1:], *strides, 0]


def _fits(many: int, item: int, dims: list[tuple[int, int]], addresses: tuple[int, int]) -> bool:
    return many == 1 or (many > 1 and _divides(many, dims) and all(a % (many * item) == 0 for a in addresses))


def _divides(many: int, dims: list[tuple[int, int]]) -> bool:
    """Whether runs of so many elements lie together everywhere."""
    *outer, (extent, stride) = dims
    return stride == 1 and extent % many == 0 and all(s % many == 0 for _, s in outer)


def _wider(dims: list[tuple[int, int]], many: int) -> list[tuple[int, int]]:
    if many == 1:
        return dims
    *outer, (extent, _) = dims
    return [*((e, s // many) for e, s in outer), (extent // many, 1)]


def _merged(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Extents and strides, neighbours that run on into each other as one."""
    dims: list[tuple[int, int]] = []
    for extent, stride in zip(shape, strides, strict=True):
        if extent == 1:
            continue
        if dims and dims[-1][1] == extent * stride:
            dims[-1] = (dims[-1][0] * extent, stride)
        else:
            dims.append((extent, stride))
    return dims or [(1, 1)]


def tiled(pieces: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[tiles, 2]: a piece and the unit where the tile begins."""
    counts = -(-pieces[:, 2] // UNITS)
    piece = np.repeat(np.arange(len(pieces)), counts)
    number = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([piece, number * UNITS], axis=1)

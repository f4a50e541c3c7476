"""Copies, comparisons and checksums of a round on a GPU: one kernel launch each, through CuPy. The kernels are in
kernels.cu, which has the same constants."""

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from millrace.weights.plans.memory import PieceInMessage, pack
from millrace.weights.transfer.checksum import mixed

log = structlog.get_logger(__name__)
UNITS = 2048
"""Units in one tile, which one block copies. A unit is the largest word that fits a piece, at most 16 bytes."""
THREADS = 256
FIELDS = 12
"""64-bit words that describe a piece: `struct Piece` in kernels.cu."""
CONVERT, CONVERT4 = 100, 101
"""Kinds of pieces that are float32 in memory and bfloat16 in the message, one or four elements a unit."""
PACK, UNPACK, COMPARE = 0, 1, 2
"""What the kernel `move` does with a piece."""
SUM_BLOCKS = 64
"""Blocks that sum one message."""
PIECES_BLOCKS = 4096
"""Blocks that sum all pieces; each sums several tiles."""
Int64Array = NDArray[np.int64]


@functools.cache
def supported() -> bool:
    """Whether CuPy is installed and compiles the kernels. Otherwise torch copies piece by piece, which is slow for many
    pieces."""
    try:
        from cupy.cuda.compiler import CompileException
    except ImportError as error:
        log.warning("CuPy is not installed: weights are copied piece by piece", error=str(error))
        return False
    try:
        _module()
    except (OSError, RuntimeError, CompileException) as error:
        log.warning("CuPy cannot compile here: weights are copied piece by piece", error=str(error))
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
    """`RoundOperations` on a GPU. Pieces that the kernels do not support (other conversions, more than four dimensions,
    values that are computed, host memory that is not pinned) go through torch. Pinned host memory has the same address
    on the device: the kernels read it over the bus, and convert on the way."""

    def __init__(
        self, pieces: Sequence[PieceInMessage], messages: Mapping[int, torch.Tensor], device: torch.device
    ) -> None:
        rows = [described(piece) if _addressable(piece.in_memory) else None for piece in pieces]
        self._unsupported = [piece for piece, row in zip(pieces, rows, strict=True) if row is None]
        self._kept = (pieces, messages)  # the kernels know their memory by address only
        supported_rows = np.array([row for row in rows if row is not None], np.int64).reshape(-1, FIELDS)
        self._pieces = torch.from_numpy(supported_rows).to(device)
        self._tiles = torch.from_numpy(tiled(supported_rows)).to(device)
        words = [(m.data_ptr(), m.numel() // 16) for m in messages.values()]
        self._messages = torch.tensor(words, dtype=torch.int64).reshape(-1, 2).to(device)
        self._numbers = list(messages)
        self._bytes = [m.numel() for m in messages.values()]
        self._sums = torch.zeros(len(messages), 2, dtype=torch.int64, device=device)
        self._differing = torch.zeros(1, dtype=torch.int32, device=device)
        self._base = min((piece.in_message.data_ptr() for piece in pieces), default=0)
        self._noted, self._found = torch.zeros(2, 2, dtype=torch.int64, device=device)

    def pack(self) -> None:
        self._move(PACK)
        pack(self._unsupported)

    def unpack(self) -> None:
        self._move(UNPACK)
        for piece in self._unsupported:
            piece.in_memory.copy_(piece.in_message)

    def sum_messages(self) -> None:
        self._sums.zero_()
        if self._numbers:
            grid = (SUM_BLOCKS, len(self._numbers))
            self._launch("sums", grid, (self._messages, self._sums))

    def compare(self) -> None:
        self._move(COMPARE)
        self._compare_unsupported()

    def note_pieces(self) -> None:
        self._sum_pieces(self._noted, in_message=True)

    def compare_noted(self) -> None:
        self._sum_pieces(self._found, in_message=False)
        self._differing += (self._found != self._noted).any().int()
        self._compare_unsupported()

    def _compare_unsupported(self) -> None:
        for piece in self._unsupported:
            self._differing += (piece.in_memory != piece.in_message).any().int()

    def _sum_pieces(self, into: torch.Tensor, *, in_message: bool) -> None:
        into.zero_()
        if count := len(self._tiles):
            arguments = (self._pieces, self._tiles, np.int64(count), np.int32(in_message), np.int64(self._base), into)
            self._launch("pieces_sum", (min(count, PIECES_BLOCKS),), arguments)

    @staticmethod
    def read_checksums(rounds: Sequence["CudaRoundOperations"]) -> Mapping[int, int]:
        numbers = [number for operations in rounds for number in operations._numbers]
        sizes = [size for operations in rounds for size in operations._bytes]
        sums = torch.cat([operations._sums for operations in rounds]).tolist()
        columns = zip(numbers, sums, sizes, strict=True)
        return {n: mixed(plain, weighted, size) for n, (plain, weighted), size in columns}

    @staticmethod
    def read_differing(rounds: Sequence["CudaRoundOperations"]) -> list[int]:
        found: list[int] = torch.cat([operations._differing for operations in rounds]).tolist()
        for operations, count in zip(rounds, found, strict=True):
            if count:
                operations._differing.zero_()
        return found

    def _move(self, mode: int) -> None:
        if len(self._tiles):
            self._launch("move", (len(self._tiles),), (self._pieces, self._tiles, np.int32(mode), self._differing))

    def _launch(self, name: str, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        import cupy

        packed = tuple(np.uint64(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments)
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            _module().get_function(name)(grid, (THREADS,), packed)


def _addressable(tensor: torch.Tensor) -> bool:
    """Whether a kernel can use the tensor's address."""
    return tensor.is_cuda or tensor.is_pinned()


def described(piece: PieceInMessage) -> list[int] | None:
    """A piece as `struct Piece` in kernels.cu, FIELDS words. None if the kernels do not support it."""
    in_memory, in_message = piece.in_memory, piece.in_message
    dims = _merged(in_memory.shape, in_memory.stride())
    if len(dims) > 4 or piece.computed is not None:
        return None
    addresses = (in_memory.data_ptr(), in_message.data_ptr())
    if in_memory.dtype != in_message.dtype:
        if (in_memory.dtype, in_message.dtype) != (torch.float32, torch.bfloat16):
            return None
        kind = CONVERT4 if _divides(4, dims) and addresses[0] % 16 == 0 and addresses[1] % 8 == 0 else CONVERT
        dims = _in_units(dims, 4 if kind == CONVERT4 else 1)
    else:
        item = in_memory.element_size()
        many = next(m for m in (16 // item, 8 // item, 4 // item, 2 // item, 1) if _fits(m, item, dims, addresses))
        kind, dims = many * item, _in_units(dims, many)
    dims = [(1, 0)] * (4 - len(dims)) + dims
    units = math.prod(extent for extent, _ in dims)
    if units >= 1 << 32:
        return None
    extents, strides = [extent for extent, _ in dims], [stride for _, stride in dims]
    return [*addresses, units, kind, *extents[1:], *strides, 0]


def _fits(many: int, item: int, dims: list[tuple[int, int]], addresses: tuple[int, int]) -> bool:
    """Whether `many` elements of `item` bytes can be one unit at these addresses."""
    return many == 1 or (many > 1 and _divides(many, dims) and all(a % (many * item) == 0 for a in addresses))


def _divides(many: int, dims: list[tuple[int, int]]) -> bool:
    """Whether the elements lie in contiguous runs of multiples of `many`. `dims`: (extent, stride), outermost first."""
    *outer, (extent, stride) = dims
    return stride == 1 and extent % many == 0 and all(s % many == 0 for _, s in outer)


def _in_units(dims: list[tuple[int, int]], many: int) -> list[tuple[int, int]]:
    """Extents and strides in units of `many` elements."""
    if many == 1:
        return dims
    *outer, (extent, _) = dims
    return [*((e, s // many) for e, s in outer), (extent // many, 1)]


def _merged(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """(extent, stride) of each dimension; neighbouring dimensions that are contiguous become one."""
    dims: list[tuple[int, int]] = []
    for extent, stride in zip(shape, strides, strict=True):
        if extent == 1:
            continue
        if dims and dims[-1][1] == extent * stride:
            dims[-1] = (dims[-1][0] * extent, stride)
        else:
            dims.append((extent, stride))
    return dims or [(1, 1)]


def tiled(pieces: Int64Array) -> Int64Array:
    """[tiles, 2]: the piece, and the unit where the tile begins, for `pieces` [N, FIELDS]."""
    counts = -(-pieces[:, 2] // UNITS)
    piece = np.repeat(np.arange(len(pieces)), counts)
    number = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([piece, number * UNITS], axis=1)

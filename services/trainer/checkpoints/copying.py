"""The bytes of tensors on their way from a GPU to host memory and to a file, in pieces, so that GPU, host and disk work
at the same time."""

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO

import torch
from torch import Tensor

PIECE_BYTES = 32 << 20
"""Bytes that are copied or written at once."""
UNSYNCED_BYTES = 256 << 20
"""Bytes that a file gets before the disk is told to take them. A host takes tens of GB into its memory before it begins
to write them by itself."""


def copied_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of these tensors in host memory."""
    copies = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    copy_to_host(tensors.values(), copies.values())
    return copies


def copy_to_host(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    """Copies each source to its target in host memory, which has the same dtype and size and no gaps."""
    pieces = (piece_b for target in targets for piece_b in _pieces(target.view(-1)))
    for piece_b, target_b in zip(_on_host(sources), pieces, strict=True):
        target_b.copy_(piece_b)


def write_through(file: BinaryIO, tensors: Iterable[Tensor]) -> None:
    """Appends the bytes of these tensors to a file, and returns when they are on the disk. While a piece is written,
    the next one comes from its GPU and the disk takes those before. Raises OSError."""
    with ThreadPoolExecutor(1, thread_name_prefix="sync") as pool:
        synced: Future[None] | None = None
        unsynced = 0
        for piece_b in _on_host(tensors):
            file.write(piece_b.numpy().data)
            unsynced += len(piece_b)
            if unsynced >= UNSYNCED_BYTES:
                if synced is not None:
                    synced.result()
                file.flush()
                synced, unsynced = pool.submit(os.fdatasync, file.fileno()), 0
        if synced is not None:
            synced.result()
    file.flush()
    os.fsync(file.fileno())


def _on_host(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The bytes of the tensors in pieces. A piece from a GPU is in one of two pinned buffers until the next piece is
    asked for; the GPU fills the other one meanwhile."""
    buffers: list[Tensor] = []
    ahead: tuple[Tensor, torch.cuda.Event | None] | None = None
    for number, piece_b in enumerate(piece_b for tensor in tensors for piece_b in _pieces(tensor)):
        if piece_b.is_cuda and not buffers:
            buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        begun = _begin_copy(piece_b, buffers[number % 2]) if piece_b.is_cuda else (piece_b, None)
        if ahead is not None:
            yield _finished(*ahead)
        ahead = begun
    if ahead is not None:
        yield _finished(*ahead)


def _begin_copy(piece_b: Tensor, buffer: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    with torch.cuda.device(piece_b.device):
        host_b = buffer[: len(piece_b)].copy_(piece_b, non_blocking=True)
        done: torch.cuda.Event = torch.cuda.current_stream().record_event()
    return host_b, done


def _finished(host_b: Tensor, done: torch.cuda.Event | None) -> Tensor:
    if done is not None:
        done.synchronize()
    return host_b


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """The bytes of a tensor, in its order, in views of at most `PIECE_BYTES`. A tensor with gaps is copied first."""
    pieces: tuple[Tensor, ...] = tensor.contiguous().reshape(-1).view(torch.uint8).split(PIECE_BYTES)
    return pieces

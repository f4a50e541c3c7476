"""A checksum of a tensor's bytes that is the same on every device and depends on their order.

With the bytes as little-endian int32 words x_0 .. x_{n-1} (zero-padded), modulo 2^64:
s = Σ x_i,  t = Σ (i + 1) · x_i,  checksum = s ⊕ rotl(t · 0x9E3779B97F4A7C15 + bytes, 23).
Integer sums do not depend on the order of addition, so any device and any split of the work give the same value. One
changed word always changes s; two swapped words change t. It detects faults, not forgery.
"""

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
ROW = 1024
"""Words whose weighted sum is exact in float64."""
CHUNK_ROWS = 64
"""Rows that are summed together: few enough to stay in a processor's cache."""


def checksum(tensor: torch.Tensor) -> int:
    """Checksum of the bytes of `tensor` in row-major order, 0 .. 2^64 - 1. Reads it once, in chunks."""
    words = _words(tensor.detach())
    rows = words.numel() // ROW
    sums = _row_sums(words[: rows * ROW].view(rows, ROW))
    first = torch.arange(rows, dtype=torch.int64, device=words.device) * ROW
    total, weighted = torch.stack([sums[0].sum(), (sums[1] + first * sums[0]).sum()]).tolist()
    rest = words[rows * ROW :].to(torch.int64)
    index = torch.arange(rows * ROW + 1, words.numel() + 1, dtype=torch.int64, device=words.device)
    last = torch.stack([rest.sum(), (rest * index).sum()]).tolist()
    return mixed(total + last[0], weighted + last[1], tensor.numel() * tensor.element_size())


def _row_sums(words: torch.Tensor) -> torch.Tensor:
    """[2, rows] int64: Σ x_i and Σ (i + 1) · x_i of each row of `words` ([rows, ROW] int32).

    In float64, which processors add fast. It is exact: no sum of a row reaches 2^31 · ROW · (ROW + 1) / 2 < 2^53.
    """
    weights = torch.arange(1, ROW + 1, dtype=torch.float64, device=words.device)
    sums = torch.empty(2, len(words), dtype=torch.float64, device=words.device)
    scratch = torch.empty(min(CHUNK_ROWS, len(words)), ROW, dtype=torch.float64, device=words.device)
    for start in range(0, len(words), CHUNK_ROWS):
        part = words[start : start + CHUNK_ROWS]
        chunk = scratch[: len(part)].copy_(part)
        torch.sum(chunk, 1, out=sums[0, start : start + len(part)])
        torch.mv(chunk, weights, out=sums[1, start : start + len(part)])
    return sums.to(torch.int64)


def mixed(total: int, weighted: int, size: int) -> int:
    """The checksum of `size` bytes from the sums s (`total`) and t (`weighted`), each modulo 2^64."""
    value = ((weighted & _MASK) * _GOLDEN + size) & _MASK
    return (total & _MASK) ^ ((value << 23 | value >> 41) & _MASK)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.contiguous().view(-1).view(torch.uint8)
    if extra := -data.numel() % 4:
        data = torch.cat([data, data.new_zeros(extra)])
    return data.view(torch.int32)

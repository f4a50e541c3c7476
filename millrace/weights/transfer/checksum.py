"""A checksum of a tensor's bytes that is the same on every device and depends on their order.

With the bytes as little-endian int32 words x_0 .. x_{n-1} (zero-padded), modulo 2^64:
s = Σ x_i,  t = Σ (i + 1) · x_i,  checksum = s ⊕ rotl(t · 0x9E3779B97F4A7C15 + bytes, 23).
Integer sums do not depend on the order of addition, so any device and any split of the work give the same value. One
changed word always changes s; two swapped words change t. It detects faults, not forgery.
"""

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_CHUNK_WORDS = 1 << 22


def checksum(tensor: torch.Tensor) -> int:
    """Checksum of the bytes of `tensor` in row-major order, 0 .. 2^64 - 1. Reads it once, in chunks of 16 MiB."""
    words = _words(tensor.detach())
    total, weighted = 0, 0
    for start in range(0, words.numel(), _CHUNK_WORDS):
        chunk = words[start : start + _CHUNK_WORDS].to(torch.int64)
        part = chunk.sum()
        index = torch.arange(1, chunk.numel() + 1, dtype=torch.int64, device=chunk.device)
        sums = torch.stack([part, (chunk * index).sum() + part * start]).tolist()
        total, weighted = (total + sums[0]) & _MASK, (weighted + sums[1]) & _MASK
    return mixed(total, weighted, tensor.numel() * tensor.element_size())


def mixed(total: int, weighted: int, size: int) -> int:
    """The checksum of `size` bytes from the sums s (`total`) and t (`weighted`), each modulo 2^64."""
    value = (weighted * _GOLDEN + size) & _MASK
    return (total & _MASK) ^ ((value << 23 | value >> 41) & _MASK)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.contiguous().view(-1).view(torch.uint8)
    if extra := -data.numel() % 4:
        data = torch.cat([data, data.new_zeros(extra)])
    return data.view(torch.int32)

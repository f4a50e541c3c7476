import numpy as np
import pytest
import torch

from millrace.weights.transfer.checksum import checksum


def slow(data: bytes) -> int:
    """The docstring's formula, one word at a time."""
    mask = (1 << 64) - 1
    words = np.frombuffer(data + b"\0" * (-len(data) % 4), dtype="<i4")
    total = weighted = 0
    for i, word in enumerate(words.tolist(), start=1):
        total = (total + word) & mask
        weighted = (weighted + i * word) & mask
    mixed = (weighted * 0x9E3779B97F4A7C15 + len(data)) & mask
    return total ^ ((mixed << 23 | mixed >> 41) & mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(1,), (7, 3), (5,), (64, 33), (0,), (1024,), (70, 1031)])
def test_is_the_formula_over_the_bytes(dtype, shape):
    tensor = (torch.randn(shape) * 100).to(dtype)
    assert checksum(tensor) == slow(tensor.view(-1).view(torch.uint8).numpy().tobytes())


def test_reads_views_in_row_major_order():
    tensor = torch.randn(6, 8)
    assert checksum(tensor.t()) == checksum(tensor.t().contiguous()) != checksum(tensor)


@pytest.mark.parametrize("word", [-(2**31), 2**31 - 1, -1])
def test_the_largest_sums_are_exact(word):
    tensor = torch.full((200 * 1024 + 7,), word, dtype=torch.int32)
    assert checksum(tensor) == slow(tensor.view(torch.uint8).numpy().tobytes())


def test_sees_every_flipped_bit_and_every_exchange():
    tensor = torch.arange(50, dtype=torch.int32)
    for i in range(50):
        for bit in (0, 13, 31):
            changed = tensor.clone()
            changed[i] ^= -(2**31) if bit == 31 else 1 << bit
            assert checksum(changed) != checksum(tensor)
    exchanged = tensor.clone()
    exchanged[[3, 40]] = exchanged[[40, 3]]
    assert checksum(exchanged) != checksum(tensor)

"""Encoding and applying gives every bit of the new message, whatever the elements are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import PublicationFailed
from millrace.weights.transfer.delta.codec import HEADER_BYTES, Coding, Header, apply, changed_words, encode

WORDS = 1 << 13


def message(words):
    return torch.tensor(words, dtype=torch.int32).to(torch.int16).view(torch.uint8)


def restored(base, new):
    """What a receiver of `base` makes of the encoded bytes, and the header."""
    kept = base.clone()
    header, encoded = encode(base, new, changed_words(base, new))
    assert torch.equal(base, kept)
    told = Header.of_bytes(header.to_bytes(), new.numel())
    assert told == header and len(encoded) == header.size and header.to_bytes().numel() == HEADER_BYTES
    if header.coding is Coding.WHOLE:
        return encoded, header
    assert header.size < new.numel()
    held = base.clone()
    apply(header, encoded.clone(), held)
    return held, header


WORD = st.one_of(
    st.integers(0, 0xFFFF),
    st.sampled_from([0, 0x8000, 0x7FC0, 0xFFC1, 0x7F81, 0x7F80, 1]),  # zeros, NaNs, infinity, the smallest
)


@settings(max_examples=150)
@given(
    base=st.lists(WORD, min_size=8, max_size=64).map(lambda words: words[: len(words) // 8 * 8]),
    spread=st.integers(1, 40),
    changes=st.dictionaries(st.integers(0, 10_000), st.one_of(WORD, st.integers(-130, 130)), max_size=60),
)
def test_every_bit_of_the_new_message_is_restored(base, spread, changes):
    words = base * spread
    new = list(words)
    for place, change in changes.items():
        new[place % len(words)] = (words[place % len(words)] + change) % 0x10000
    old, wanted = message(words), message(new)
    held, header = restored(old, wanted)
    assert torch.equal(held, wanted)
    assert header.changed == sum(a != b for a, b in zip(words, new, strict=True))


def drawn(dtype, seed=0):
    random = torch.Generator().manual_seed(seed)
    kind = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float8": torch.float8_e4m3fn}[dtype]
    values = torch.randn(WORDS, generator=random).to(kind)
    return values.view(torch.uint8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8"])
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.1, 0.4, 1.0])
def test_messages_of_every_dtype_and_density(dtype, share):
    base = drawn(dtype)
    words, random = base.view(torch.int16).clone(), torch.Generator().manual_seed(7)
    chosen = torch.rand(len(words), generator=random) < share
    words[chosen] += torch.randint(1, 4, words.shape, generator=random, dtype=torch.int16)[chosen]
    new = words.view(torch.uint8)
    held, header = restored(base, new)
    assert torch.equal(held, new)
    assert header.changed == int(chosen.sum())
    expected = {0.0: Coding.GAPS, 1e-4: Coding.GAPS, 0.01: Coding.GAPS, 0.1: Coding.GAPS}.get(share, Coding.BITMAP)
    assert header.coding is expected
    assert header.size <= len(base) * max(0.01, min(share * 1.2, 0.0625 + share / 2 + 0.01))


def test_other_bits_everywhere_travel_as_they_are():
    header, encoded = encode(drawn("bfloat16"), new := drawn("bfloat16", 1), changed_words(drawn("bfloat16"), new))
    assert header.coding is Coding.WHOLE and encoded is new


@pytest.mark.parametrize("place", [0, 1, 254, 255, 256, 510, 511, WORDS - 1])
@pytest.mark.parametrize("change", [1, -128, 127, 128, -32768])
def test_one_element(place, change):
    base = drawn("bfloat16")
    words = base.view(torch.int16).clone()
    words[place] += change
    held, header = restored(base, words.view(torch.uint8))
    assert torch.equal(held, words.view(torch.uint8))
    assert header.changed == 1 and header.size <= 6


def test_nothing_changed_is_no_bytes():
    base = drawn("bfloat16")
    held, header = restored(base, base.clone())
    assert torch.equal(held, base) and header.size == 0
    empty = torch.zeros(0, dtype=torch.uint8)
    assert torch.equal(restored(empty, empty)[0], empty)


@settings(max_examples=100)
@given(st.integers(0, 2**31), st.integers(0, 255), st.sampled_from([0.01, 0.4]))
def test_a_damaged_byte_never_writes_beside_the_message(where, value, share):
    base = drawn("bfloat16")
    words = base.view(torch.int16).clone()
    words[torch.rand(len(words), generator=torch.Generator().manual_seed(3)) < share] += 1
    header, encoded = encode(base, new := words.view(torch.uint8), changed_words(base, new))
    encoded[where % len(encoded)] = value
    around = torch.full((len(base) + 64,), 77, dtype=torch.uint8)
    held = around[32:-32]
    held.copy_(base)
    try:
        apply(header, encoded, held)
    except PublicationFailed:
        assert header.coding is Coding.BITMAP
    assert (around[:32] == 77).all() and (around[-32:] == 77).all()


@settings(max_examples=200)
@given(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255))
def test_a_damaged_header_is_refused_or_harmless(where, value):
    header, _ = encode(base := drawn("bfloat16"), new := base.clone().index_fill_(0, torch.tensor([5, 900]), 3),
                       changed_words(base, new))  # fmt: skip
    data = header.to_bytes()
    data[where] = value
    try:
        told = Header.of_bytes(data, len(base))
    except PublicationFailed:
        return
    assert told.size == told.expected_size(len(base)) <= len(base)

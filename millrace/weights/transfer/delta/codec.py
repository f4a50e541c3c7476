"""What changed between two versions of one message, in few bytes and exact. Pure functions on torch tensors, on any
device.

A message is a sequence of 16-bit words, whatever the dtypes of its tensors are: one word is one bfloat16 element, half
a float32 or two float8 elements. After an optimizer's step most changed words differ by a few units from what they
were. So a change is its place and the difference of the two words as integers (modulo 2^16), which is exact for every
pattern of bits: NaN and -0.0 are words like others.

Three ways to write the changes of a message:

* gaps: for each change one byte for the distance to the change before, and one for the difference. A distance above 255
  is written as changes by zero in between.
* bitmap: one bit for each word of the message, and one byte for each difference.
* whole: the message itself, if that is shorter.

A difference that does not fit in one byte is written apart in both: place (4 bytes) and the new word (2 bytes).
"""

import enum
from dataclasses import dataclass

import numpy as np
import torch

from millrace.errors import PublicationFailed

WORD = 2
"""Bytes of a word."""
HEADER_BYTES = 40
LONGEST_GAP = 255
LARGE_BYTES = 6
"""Bytes of a difference that is written apart."""
CHUNK_WORDS = 1 << 19
"""Words that a CPU compares at a time: few enough to stay in its cache."""
MOST_WORDS = 1 << 31
"""Places are 32-bit integers."""


class Coding(enum.IntEnum):
    """How the bytes of a message are written."""

    WHOLE = 0
    GAPS = 1
    BITMAP = 2


@dataclass(frozen=True)
class Header:
    """What a receiver has to know before the encoded bytes of a message arrive."""

    coding: Coding
    size: int
    """Bytes that follow."""
    entries: int = 0
    """Differences of one byte, those of zero included."""
    large: int = 0
    """Differences that are written apart."""
    changed: int = 0
    """Words that changed."""

    def to_bytes(self) -> torch.Tensor:
        """[HEADER_BYTES] uint8, on the CPU."""
        fields = [self.coding, self.size, self.entries, self.large, self.changed]
        return torch.tensor(fields, dtype=torch.int64).view(torch.uint8)

    @classmethod
    def of_bytes(cls, data: torch.Tensor, message_bytes: int) -> "Header":
        """The header of a message of `message_bytes`. Raises PublicationFailed for bytes that are none."""
        coding, size, entries, large, changed = data.cpu().view(torch.int64).tolist()
        words = message_bytes // WORD
        if coding in tuple(Coding) and 0 <= entries <= words and 0 <= large <= words:
            header = cls(Coding(coding), size, entries, large, changed)
            if size == header.expected_size(message_bytes) <= message_bytes:
                return header
        what = f"the description of a message of {message_bytes} bytes arrived damaged."
        raise PublicationFailed(what, "publish again; where it repeats, look at the network and the memory.")

    def expected_size(self, message_bytes: int) -> int:
        """Bytes that the other fields ask for."""
        if self.coding is Coding.WHOLE:
            return message_bytes
        places = self.entries if self.coding is Coding.GAPS else _bitmap_bytes(message_bytes // WORD)
        return self.large * LARGE_BYTES + places + self.entries


def changed_words(base: torch.Tensor, message: torch.Tensor) -> torch.Tensor:
    """[changes] int64: places of the words in which two messages of equal size differ, ascending. Both are [bytes]
    uint8, a multiple of 16."""
    ours, theirs = message.view(torch.int16), base.view(torch.int16)
    if message.device.type == "cpu":
        parts = [
            torch.from_numpy(np.flatnonzero(ours[n : n + CHUNK_WORDS].numpy() != theirs[n : n + CHUNK_WORDS].numpy()))
            + n
            for n in range(0, len(ours), CHUNK_WORDS)
        ]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
    return torch.nonzero(ours != theirs).view(-1)


def encode(base: torch.Tensor, message: torch.Tensor, changed: torch.Tensor) -> tuple[Header, torch.Tensor]:
    """Header and bytes ([size] uint8) from which `apply` makes `message` of `base`. `changed`: see `changed_words`.
    Where nothing is shorter, the bytes are those of `message` itself, not copied."""
    words = message.numel() // WORD
    changes, whole = len(changed), (Header(Coding.WHOLE, message.numel(), changed=len(changed)), message)
    if words >= MOST_WORDS or min(_bitmap_bytes(words) + changes, 2 * changes) > message.numel():
        return whole
    new = message.view(torch.int16).index_select(0, changed)
    difference = new - base.view(torch.int16).index_select(0, changed)
    far = torch.nonzero((difference < -128) | (difference > 127)).view(-1)
    near, small = changed, difference.to(torch.int8)
    if len(far):
        kept = torch.nonzero((difference >= -128) & (difference <= 127)).view(-1)
        near, small = changed.index_select(0, kept), small.index_select(0, kept)
    bits = _bitmap_bytes(words)
    coding, gaps, padded = Coding.BITMAP, near[:0], small[:0]
    if len(near) < bits:  # otherwise the bitmap is shorter
        gaps, padded = _gaps(near, small)
        coding = Coding.GAPS if 2 * len(gaps) <= bits + len(near) else Coding.BITMAP
        if LARGE_BYTES * len(near) < min(2 * len(gaps), bits + len(near)):  # few and far between
            far, coding = torch.arange(changes, device=changed.device), Coding.GAPS
            gaps, padded = gaps[:0], padded[:0]
    places = changed.index_select(0, far).to(torch.int32)
    large = [places.view(torch.uint8), new.index_select(0, far).view(torch.uint8)]
    if coding is Coding.GAPS:
        parts = [*large, gaps, padded.view(torch.uint8)]
    else:
        parts = [*large, _bitmap(near, words), small.view(torch.uint8)]
    encoded = torch.cat(parts)
    if encoded.numel() >= message.numel():
        return whole
    return Header(coding, encoded.numel(), len(parts[3]), len(far), changes), encoded


def apply(header: Header, encoded: torch.Tensor, message: torch.Tensor) -> None:
    """Makes the base in `message` ([bytes] uint8) the version that was encoded, in place. Not for Coding.WHOLE.

    Corrupt input cannot write out of bounds; the checksum detects it. Raises PublicationFailed
    if they contradict the header.
    """
    words, large = message.view(torch.int16), header.large
    last = len(words) - 1
    places = encoded[: 4 * large].view(torch.int32).to(torch.int64).clamp(0, last)
    values = encoded[4 * large : LARGE_BYTES * large].view(torch.int16)
    rest, differences = encoded[LARGE_BYTES * large :], encoded[len(encoded) - header.entries :].view(torch.int8)
    if header.coding is Coding.GAPS:
        near = (torch.cumsum(rest[: header.entries], 0, dtype=torch.int64) - 1).clamp(0, last)
    else:
        near = _set_bits(rest[: _bitmap_bytes(len(words))]).clamp(0, last)
        if len(near) != header.entries:
            raise PublicationFailed("the changes of a message arrived damaged.", "publish again.")
    words.index_copy_(0, near, words.index_select(0, near) + differences)
    words.index_copy_(0, places, values)


def _gaps(near: torch.Tensor, difference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[entries] uint8 distances, the first from -1, and [entries] int8 differences. Places that are more than
    LONGEST_GAP apart have differences of zero in between."""
    distance = torch.diff(near, prepend=near.new_tensor([-1]))
    between = (distance - 1) // LONGEST_GAP
    at = torch.cumsum(between + 1, 0) - 1
    entries = int(at[-1]) + 1 if len(at) else 0
    gaps = torch.full((entries,), LONGEST_GAP, dtype=torch.uint8, device=near.device)
    gaps.index_copy_(0, at, (distance - LONGEST_GAP * between).to(torch.uint8))
    differences = torch.zeros(entries, dtype=torch.int8, device=near.device)
    differences.index_copy_(0, at, difference)
    return gaps, differences


def _bitmap_bytes(words: int) -> int:
    return -(-words // 8)


def _bitmap(places: torch.Tensor, words: int) -> torch.Tensor:
    """[words / 8] uint8 with the bits of `places` set, the lowest bit first."""
    bits = torch.zeros(8 * _bitmap_bytes(words), dtype=torch.uint8, device=places.device)
    bits.index_fill_(0, places, 1)
    if places.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))
    return (bits.view(-1, 8) << _bit_numbers(places.device)).sum(1, dtype=torch.uint8)


def _set_bits(bitmap: torch.Tensor) -> torch.Tensor:
    if bitmap.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(np.unpackbits(bitmap.numpy(), bitorder="little")))
    bits = (bitmap.unsqueeze(1) >> _bit_numbers(bitmap.device)) & 1
    return torch.nonzero(bits.view(-1)).view(-1)


def _bit_numbers(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)

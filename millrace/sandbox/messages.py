"""What a process and its sandbox send each other: messages over a pipe, and how the sandbox ended (`Verdict`).

A message is JSON after its length, read without a buffer, so that several processes may read one after the other from
the same pipe.
"""

import json
import os
import select
import struct
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Limit(StrEnum):
    """A limit of all processes of a sandbox together."""

    MEMORY = "memory"
    PROCESSES = "processes"
    TIME = "time"
    """Seconds since its start, or of a processor."""
    OUTPUT = "output"
    """Bytes that it prints."""


@dataclass(frozen=True)
class Verdict:
    """One of the three is set."""

    status: int | None = None
    """The code ended with this exit status."""
    signal: int | None = None
    """This signal ended the code."""
    limit: Limit | None = None
    """The sandbox was ended because it passed this limit."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Verdict":
        fields = json.loads(data)
        limit = fields.pop("limit")
        return cls(**fields, limit=None if limit is None else Limit(limit))


_LENGTH = struct.Struct(">I")
LONGEST = 256 << 20
"""Bytes of a message."""


def send(descriptor: int, message: Mapping[str, Any]) -> None:
    """Writes a message. Raises BrokenPipeError if nobody reads it any more."""
    text = json.dumps(message).encode()
    left = memoryview(_LENGTH.pack(len(text)) + text)
    while left:
        left = left[os.write(descriptor, left) :]


def receive(descriptor: int, deadline: float | None = None) -> dict[str, Any] | None:
    """The next message; None at the end of the pipe. Raises TimeoutError at `deadline`, a time of time.monotonic(),
    and ValueError for what is not a message."""
    if (head := _read(descriptor, _LENGTH.size, deadline)) is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > LONGEST:
        raise ValueError(f"a message of {length} bytes")
    text = _read(descriptor, length, deadline)
    message = None if text is None else json.loads(text)
    return message if isinstance(message, dict) else None


def _read(descriptor: int, count: int, deadline: float | None) -> bytes | None:
    """Exactly `count` bytes; None if the pipe ends before."""
    parts = bytearray()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while len(parts) < count:
        if deadline is not None and not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        if not (part := os.read(descriptor, count - len(parts))):
            return None
        parts += part
    return bytes(parts)

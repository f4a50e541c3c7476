"""How a sandbox ended, as its first process tells the one that started it."""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum


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
    def decode(cls, told: bytes) -> "Verdict":
        fields = json.loads(told)
        limit = fields.pop("limit")
        return cls(**fields, limit=None if limit is None else Limit(limit))

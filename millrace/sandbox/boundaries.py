"""What separates a user's code from the service that runs it, and what of it this machine does not give."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Boundary(StrEnum):
    """One thing that a sandbox keeps apart."""

    PROCESSES = "processes"
    """A PID namespace: no process outside can be seen, signalled or traced, and everything inside ends together."""
    FILES = "files"
    """A tree of files that holds what the code needs, read-only, and an empty /tmp. Nothing else exists in it."""
    NETWORK = "network"
    """A network namespace without interfaces: no address and no abstract socket can be reached."""
    IPC = "ipc"
    """An IPC namespace: no shared memory and no message queue of others."""
    USER = "user"
    """A user id that owns nothing if the service is root, otherwise a user namespace without capabilities."""
    LIMITS = "limits"
    """Memory and number are counted over all processes of the sandbox together."""


@dataclass(frozen=True)
class Missing:
    """A boundary that this machine does not give."""

    boundary: Boundary
    reason: str
    """What failed, and what the kernel answered."""


def listed(missing: Sequence[Missing]) -> str:
    """`network (unshare: Operation not permitted), ipc (...)`."""
    return ", ".join(f"{each.boundary} ({each.reason})" for each in missing)

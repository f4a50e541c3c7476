"""The memory and the number of all processes of a sandbox, as its first process sees them in /proc."""

import math
import os
from collections.abc import Callable
from pathlib import Path

FIRST = 1
"""The pid of the first process of a PID namespace."""


def inside() -> list[int]:
    """All processes of this PID namespace but the first."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and entry.name != str(FIRST)]


def descendants() -> list[int]:
    """All descendants of this process, where it has no PID namespace."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():  # a kernel without CONFIG_PROC_CHILDREN
        import psutil

        return [child.pid for child in psutil.Process().children(recursive=True)]
    found, pending = [], [os.getpid()]
    while pending:
        children = _children(pending.pop())
        found += children
        pending += children
    return found


def _children(pid: int) -> list[int]:
    """The children of all threads of a process; none where it has ended."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        texts = [Path(f"/proc/{pid}/task/{thread}/children").read_text() for thread in threads]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for text in texts for child in text.split()]


Members = Callable[[], list[int]]


def memory_bytes(pids: list[int], enough: float = math.inf) -> int:
    """Memory of these processes that is not backed by files, swapped or not.

    Pages that processes share are counted once for each, which is quick; if that comes to more than `enough`, the
    share of each is summed up instead.
    """
    if (most := sum(_counted(pid, "status", ("RssAnon", "RssShmem", "VmSwap")) for pid in pids)) <= enough:
        return most
    return sum(_counted(pid, "smaps_rollup", ("Pss_Anon", "Pss_Shmem", "SwapPss")) for pid in pids)


def _counted(pid: int, file: str, fields: tuple[str, ...]) -> int:
    """Sum of these fields in bytes; 0 for a process that has ended."""
    try:
        text = Path("/proc", str(pid), file).read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except PermissionError:
        # A process that keeps its counters to itself is counted with all that it shares.
        return _counted(pid, "status", ("RssAnon", "RssShmem", "VmSwap")) if file != "status" else 0
    lines = (line.partition(":") for line in text.splitlines())
    return sum(int(value.split()[0]) * 1024 for name, _, value in lines if name in fields)

"""The memory and the number of all processes of a sandbox, as its first process sees them in /proc."""

import contextlib
import math
import os
from pathlib import Path

from millrace.sandbox import tree
from millrace.sandbox.messages import Limit

FIRST = 1
"""The pid of the first process of a PID namespace."""


def inside() -> list[int]:
    """All processes of this PID namespace but the first."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and entry.name != str(FIRST)]


def descendants() -> list[int]:
    """All descendants of this process, if it has no PID namespace."""
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
    """The children of all threads of a process; none if it has ended."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        texts = [Path(f"/proc/{pid}/task/{thread}/children").read_text() for thread in threads]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(child) for text in texts for child in text.split()]


class Meter:
    """Whether all processes and files of a sandbox together have passed its limits."""

    def __init__(self, memory_mb: int, processes: int, *, own_tree: bool, own_segments: bool) -> None:
        """What is there now is not counted. `own_tree`: this process is the first of a PID namespace and has a tree of
        files of its own; otherwise its descendants are counted, and no files. `own_segments`: it has an IPC namespace
        of its own; otherwise segments of shared memory are others' too, and are not counted."""
        self._own_tree = own_tree
        self._own_segments = own_segments
        self._processes = processes
        self._most = (memory_mb << 20) + self._files() + memory_bytes([os.getpid()])
        self._segments = self._segment_bytes()

    def passed(self) -> Limit | None:
        """The limit that is passed at this moment."""
        pids = inside() if self._own_tree else descendants()
        files = self._files() + self._unmapped(pids)
        if memory_bytes(pids, self._most - files) + files > self._most:
            return Limit.MEMORY
        return Limit.PROCESSES if len(pids) > self._processes else None

    def _files(self) -> int:
        return tree.used_bytes() if self._own_tree else 0

    def _unmapped(self, pids: list[int]) -> int:
        """Memory that belongs to no process: files without a name, and segments that need not be attached."""
        return nameless_bytes(pids) + max(0, self._segment_bytes() - self._segments)

    def _segment_bytes(self) -> int:
        return segment_bytes() if self._own_segments else 0


def memory_bytes(pids: list[int], enough: float = math.inf) -> int:
    """Memory of these processes that is not backed by files, swapped or not.

    Pages that processes share are counted once for each, which is quick; if that comes to more than `enough`, the
    share of each is summed up instead.
    """
    if (most := sum(_counted(pid, "status", ("RssAnon", "RssShmem", "VmSwap")) for pid in pids)) <= enough:
        return most
    return sum(_counted(pid, "smaps_rollup", ("Pss_Anon", "Pss_Shmem", "SwapPss")) for pid in pids)


def nameless_bytes(pids: list[int]) -> int:
    """Memory of the files of memfd_create(2) that these processes have open."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        folder = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):
            for number in os.listdir(folder):
                with contextlib.suppress(OSError):
                    if os.readlink(f"{folder}/{number}").startswith("/memfd:"):
                        held = os.stat(f"{folder}/{number}")
                        sizes[held.st_dev, held.st_ino] = held.st_blocks * 512
    return sum(sizes.values())


def segment_bytes() -> int:
    """Memory of the segments of shmget(2) in this IPC namespace."""
    try:
        _, *lines = Path("/proc/sysvipc/shm").read_text().splitlines()
    except OSError:
        return 0
    return sum(sum(map(int, line.split()[-2:])) for line in lines)


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

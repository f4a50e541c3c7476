"""vLLM's own processes: forked instead of spawned where that is possible, and asked why they ended.

vLLM asks multiprocessing to spawn its engine's core, and the core to spawn the workers. In a replica that a launcher
has forked (`services/rollout/launch.py`) both are forked instead, from the same fork server, and import nothing again.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Set
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess, SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
from pydantic import ValidationError

from services.rollout.lifeline import kill_descendants

PRELOAD = "services.rollout.engines.vllm.preload"
LONGEST_REASON = 4000
"""Characters."""


class EngineProcess(BaseProcess):
    """A process that vLLM takes for a spawned one. Where what it runs raises ValueError or TypeError, as for options
    that do not fit, the process that started it can read why."""

    def start(self) -> None:
        reader, self._refused = multiprocessing.Pipe(duplex=False)
        super().start()
        self._refused.close()
        STARTED.append((self, reader))

    def run(self) -> None:
        take_over_spawn()
        try:
            super().run()
        except (ValueError, TypeError) as error:
            self._refused.send_bytes(reason(error)[:LONGEST_REASON].encode())
            raise


class SpawnedProcess(EngineProcess, SpawnProcess):
    """A process that imports vLLM itself."""


class ForkedProcess(EngineProcess, ForkServerProcess):
    """A process that has imported vLLM already. It has the environment of the process that started it, as a spawned one
    would, and is killed when that one ends."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        parent = multiprocessing.parent_process()
        assert parent is not None
        threading.Thread(target=_end_after, args=[parent.sentinel], name="lifeline", daemon=True).start()
        super().run()


def reason(error: Exception) -> str:
    """What vLLM's error says, without the words of the library that checks its options."""
    if isinstance(error, ValidationError):
        return "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors()).removesuffix(".")
    return str(error).removesuffix(".")


STARTED: list[tuple[EngineProcess, Connection]] = []
"""The processes that this one has started, each with the pipe on which it says why it refuses."""


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def take_over_spawn() -> None:
    """From now on vLLM's processes are of the classes above. They are forked if this process was forked from one that
    has imported vLLM and has not started CUDA, and spawned otherwise."""
    import torch

    context: Any = SpawnContext
    if PRELOAD not in sys.modules or forkserver.get_inherited_fds() is None or torch.cuda._is_in_bad_fork():
        context.Process = SpawnedProcess
        return
    context.Process = ForkedProcess
    # Python 3.11 and 3.12 start another fork server here, although this process has the address of its own.
    server: Any = forkserver
    server._forkserver.ensure_running = lambda: None


def refusals() -> list[str]:
    """Why processes that this one has started have refused what they were to run; each is told once."""
    told = []
    for _, reader in STARTED:
        with contextlib.suppress(EOFError, OSError):
            if reader.poll():
                told.append(reader.recv_bytes().decode())
        reader.close()
    STARTED.clear()
    return told


def kill_engine(others: Set[BaseProcess], *, cores: bool = True) -> None:
    """Kills the engine's processes: its workers, and unless told otherwise those that this process has started itself.
    `others` are children of this process that are none of vLLM's."""
    started = [child.pid for child in multiprocessing.active_children() if child not in others and child.pid]
    for process in forked_beside():
        if process.pid not in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    for pid in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            kill_descendants(process)
            if cores:
                process.kill()


def forked_beside() -> list[psutil.Process]:
    """The engine's processes that were forked from the fork server of this one."""
    context: Any = SpawnContext
    if context.Process is not ForkedProcess:
        return []
    return [process for process in psutil.Process(os.getppid()).children() if process.pid != os.getpid()]

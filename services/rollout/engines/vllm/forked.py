"""vLLM's processes, forked from the process that the replica was forked from, so that they import nothing again.

vLLM asks multiprocessing to spawn its engine's core, and the core to spawn the workers. In a replica that a launcher
has forked (`services/rollout/launch.py`) both are forked instead, from the same fork server.
"""

import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess, SpawnContext
from typing import Any

import psutil

PRELOAD = "services.rollout.engines.vllm.preload"


class ForkedProcess(ForkServerProcess):
    """A process that vLLM takes for a spawned one: with the environment of the process that started it. It is killed
    when that one ends."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        parent = multiprocessing.parent_process()
        assert parent is not None
        threading.Thread(target=_end_after, args=[parent.sentinel], name="lifeline", daemon=True).start()
        fork_processes()
        super().run()


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def fork_processes() -> None:
    """From now on vLLM's processes are forked, if this process was forked from one that has imported vLLM and has not
    started CUDA. Otherwise vLLM goes on to spawn them."""
    import torch

    if PRELOAD not in sys.modules or forkserver.get_inherited_fds() is None or torch.cuda._is_in_bad_fork():
        return
    context: Any = SpawnContext
    context.Process = ForkedProcess
    # Python 3.11 and 3.12 start another fork server here, although this process has the address of its own.
    server: Any = forkserver
    server._forkserver.ensure_running = lambda: None


def forked_beside() -> list[psutil.Process]:
    """The engine's processes that were forked from the fork server of this one."""
    context: Any = SpawnContext
    if context.Process is not ForkedProcess:
        return []
    return [process for process in psutil.Process(os.getppid()).children() if process.pid != os.getpid()]

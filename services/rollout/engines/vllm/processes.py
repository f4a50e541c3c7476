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
from collections.abc import Iterator, Set
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess, SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
from pydantic import ValidationError

from millrace.errors import InvalidJob, Unavailable
from services.rollout.engines.lifeline import kill_descendants

PRELOAD = "services.rollout.engines.vllm.preload"
WORKERS_END_S = 0.5
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
    messages = []
    for _, reader in STARTED:
        with contextlib.suppress(EOFError, OSError):
            if reader.poll():
                messages.append(reader.recv_bytes().decode())
        reader.close()
    STARTED.clear()
    return messages


@contextlib.contextmanager
def start_errors(model: str, path: str, options: str) -> Iterator[None]:
    """Around the start of an engine. Raises InvalidJob if vLLM refuses the folder `path`, which the job names in the
    field `model`, with the options in the field `options`; and Unavailable if it does not start for another
    reason."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        what = f"vLLM refused {model} {path} with {options}: {reason(error)}."
        raise InvalidJob(what, "fix the named option; vLLM's log above says more.") from error
    except (RuntimeError, MemoryError) as error:
        if refused := refusals():
            what = f"vLLM's engine refused {model} {path} with {options}: {refused[0]}."
            raise InvalidJob(what, "fix the named option; vLLM's log above says more.") from error
        what = f"vLLM did not start with {path}: {error}."
        raise Unavailable(what, "its log above names the cause; memory and CUDA devices first.") from error


def shut_down(llm: Any, others: Set[BaseProcess]) -> None:
    """Ends the processes of an AsyncLLM. `others`: as in `kill_engine`."""
    # EngineCore would wait seconds for its workers, which have nothing to finish.
    hurry = threading.Timer(WORKERS_END_S, kill_engine, [others], {"cores": False})
    hurry.start()
    llm.shutdown()
    hurry.cancel()


def kill_engine(others: Set[BaseProcess], *, cores: bool = True) -> None:
    """Kills the engine's processes: its workers, and unless told otherwise those that this process has started itself.
    `others` are child processes that vLLM did not start."""
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

"""Starts the ranks of a trainer on one host: `python -m services.trainer.launch --ranks 2 --coordinator HOST:PORT`.

The ranks are forked from a process that has imported what they need once, so that ranks which are started again after a
failure are there within a second. A trainer is all of its ranks: where one ends with a failure, the others are killed,
and all are started anew. `torchrun` does the same over several hosts, where every rank imports by itself.

This process imports no torch. SIGTERM and SIGINT are passed on to the ranks, which drain.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from types import FrameType
from typing import Annotated

import structlog
import typer

from millrace.errors import MillraceError
from millrace.local.ports import free_port
from millrace.local.restarts import Restarts
from millrace.telemetry import logs
from millrace.version import VersionOption
from millrace.wire.address import (
    CoordinatorOption,
    HostOption,
    InsecureOption,
    bind_address,
    host_address,
    require_token,
)

log = structlog.get_logger(__name__)

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = [
    "services.trainer.__main__",  # first: it sets what torch reads when it is loaded
    "services.trainer.backends.fsdp2.backend",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
]
"""What is imported before ranks are forked. None of it starts a thread or CUDA. Megatron is not
in it: on a host without CUDA it changes torch."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""For several ranks, which share the cores, where nothing else is set: torchrun's default too. Read when torch is
loaded."""
ASKING_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Whether there is a GPU may be asked before the fork, but CUDA must not be started there."""


class Launcher:
    """The ranks of one trainer, from start to end."""

    def __init__(self, ranks: int, coordinator: str, port: int, restarts: Restarts) -> None:
        self._ranks, self._coordinator, self._restarts = ranks, coordinator, restarts
        # The same in every life: the coordinator removes a dead trainer as soon as another one has its address.
        self._port = port or free_port()
        self._running: list[ForkServerProcess] = []
        self._stopping = False

    def run(self) -> int:
        """Returns the exit status: 0 where the ranks were drained, 1 where they failed too often."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        while not self._stopping:
            began = time.monotonic()
            if not (failed := self._live()):
                return 0
            if self._stopping:
                return 1
            wait_s = self._restarts.wait_s(time.monotonic())
            told = {"failed": failed, "lived_s": round(time.monotonic() - began)}
            if wait_s is None:
                log.error("the ranks failed too often and are not started again", **told)
                return 1
            log.error("a rank failed: all ranks are started again", **told, wait_s=wait_s)
            time.sleep(wait_s)
        return 0

    def _live(self) -> str:
        """One life of the ranks. Answers how the first of them failed; empty where all ended in order."""
        port = free_port()
        self._running = []
        for rank in range(self._ranks):
            self._running.append(self._start(rank, port))
        if self._stopping:  # told while they were started
            self._pass_on()
        left = {process.sentinel: rank for rank, process in enumerate(self._running)}
        while left:
            for sentinel in wait(list(left)):
                assert isinstance(sentinel, int)
                rank = left.pop(sentinel)
                process = self._running[rank]
                process.join()
                if process.exitcode != 0:
                    self._kill()
                    return f"rank {rank} (pid {process.pid}) {_how(process.exitcode)}"
        return ""

    def _start(self, rank: int, port: int) -> ForkServerProcess:
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._ranks),
            "LOCAL_WORLD_SIZE": str(self._ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        process = CONTEXT.Process(target=_rank, args=(environment, self._coordinator, self._port), name=f"rank-{rank}")
        process.start()
        return process

    def _kill(self) -> None:
        for process in self._running:
            # Where the process that forked them was killed, all seem to have ended with 255.
            if process.pid is not None and process.exitcode in (None, 255):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for process in self._running:
            process.join()

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True
        self._pass_on()

    def _pass_on(self) -> None:
        for process in self._running:
            process.terminate()


def _how(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _rank(environment: Mapping[str, str], coordinator: str, port: int) -> None:
    """One rank, in its own process."""
    os.environ.update(environment)
    from services.trainer.__main__ import serve

    sys.exit(serve(coordinator, port))


def main(
    coordinator: CoordinatorOption,
    ranks: Annotated[int, typer.Option(envvar="MILLRACE_RANKS", help="Number of ranks, one a GPU.", min=1)] = 1,
    port: Annotated[
        int, typer.Option(envvar="MILLRACE_PORT", help="Port of the trainer's gRPC server; 0: a free port.")
    ] = 0,
    host: HostOption = "",
    insecure: InsecureOption = False,
    version: VersionOption = False,
) -> None:
    """Runs a trainer with all of its ranks on this host, and starts them again when one fails."""
    if host:
        os.environ["MILLRACE_HOST"] = host
    for name, value in {**ASKING_NVML, **(ONE_THREAD if ranks > 1 else {})}.items():
        os.environ.setdefault(name, value)
    logs.configure("trainer", "launcher")
    try:
        require_token(bind_address(host_address()), insecure=insecure)
    except MillraceError as error:
        print(f"trainer: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    CONTEXT.set_forkserver_preload(PRELOADED)
    raise typer.Exit(Launcher(ranks, coordinator, port, RESTARTS).run())


RESTARTS = Restarts(limit=3, window_s=600.0, first_wait_s=0.1, longest_wait_s=1.0)
"""Ranks that fail more often end the trainer: whoever started it has a wider view."""


if __name__ == "__main__":
    typer.run(main)

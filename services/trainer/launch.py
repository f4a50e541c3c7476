"""Starts the ranks of a trainer on one host: `python -m services.trainer.launch --ranks 2 --coordinator HOST:PORT`.

A trainer is all of its ranks: if one ends with a failure, the others are killed, and all are started again, within a
second, from a process that has imported what they need (`millrace/local/launcher.py`). `torchrun` does the same over
several hosts, where every rank imports by itself.

This process imports no torch. SIGTERM and SIGINT are passed on to the ranks, which drain.
"""

import os
import sys
from collections.abc import Mapping
from functools import partial
from multiprocessing.context import ForkServerProcess
from typing import Annotated

import typer

from millrace.local.launcher import FORKING, RESTARTS, Launcher, fork_from, stand_by
from millrace.local.ports import free_port
from millrace.service_process import VersionOption, option
from millrace.telemetry import logs
from millrace.telemetry.metrics.prometheus.endpoint import MetricsPortOption
from millrace.wire import last_words
from millrace.wire.address import CoordinatorOption, HostOption, InsecureOption, advertise
from millrace.wire.membership import PartitionOption, work_in
from services.trainer.options import SILENT_S, PortOption, SilentOption, end_unprotected

PRELOADED = [
    "services.trainer.rank",  # first: it sets what torch reads when it is loaded
    "services.trainer.backends.fsdp2.backend",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
]
"""What is imported before ranks are forked. None of it starts a thread or CUDA. Megatron is not
in it: on a host without CUDA it changes torch."""
ASKING_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Whether there is a GPU may be asked before the fork, but CUDA must not be started there."""


def life(ranks: int, coordinator: str, port: int, silent_s: float, metrics_port: int = 0) -> list[ForkServerProcess]:
    """The ranks of one life, which are not started yet. `port`: of the trainer's gRPC server. See SilentOption and
    MetricsPortOption."""
    together = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    arguments = (coordinator, port, silent_s, metrics_port)
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **together} for rank in range(ranks)]
    return [
        FORKING.Process(target=_rank, args=(environment, *arguments), name=f"rank {environment['RANK']}")
        for environment in own
    ]


def threads(ranks: int) -> dict[str, str]:
    """The variable for the threads that a rank computes with on the CPU, if it is not set: the ranks share the cores
    of the host, which an optimizer in host memory needs. torch reads it when it is loaded."""
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}


def _rank(environment: Mapping[str, str], coordinator: str, port: int, silent_s: float, metrics_port: int) -> None:
    """One rank, in its own process."""
    os.environ.update(environment)
    from services.trainer.rank import serve

    last_words.listen()
    sys.exit(serve(coordinator, port, silent_s, metrics_port))


def main(
    coordinator: CoordinatorOption,
    ranks: Annotated[int, option("MILLRACE_RANKS", "Number of ranks, one a GPU.", min=1)] = 1,
    port: PortOption = 0,
    host: HostOption = "",
    partition: PartitionOption = "",
    silent_s: SilentOption = SILENT_S,
    metrics_port: MetricsPortOption = 0,
    insecure: InsecureOption = False,
    version: VersionOption = False,
) -> None:
    """Runs a trainer with all of its ranks on this host, and starts them again when one fails."""
    advertise(host)
    work_in(partition)
    for name, value in {**ASKING_NVML, **threads(ranks)}.items():
        os.environ.setdefault(name, value)
    logs.configure("trainer", "launcher")
    end_unprotected(insecure)
    fork_from(*PRELOADED)
    stand_by()
    # The port is the same in every life: the coordinator removes a dead trainer as soon as another one has its address.
    ranks_of_one_life = partial(life, ranks, coordinator, port or free_port(), silent_s, metrics_port)
    raise typer.Exit(Launcher(ranks_of_one_life, RESTARTS, silent_s + CALL_S).run())


CALL_S = 11.0
"""Rank 0 shows life before each call to the coordinator: so long a call and the pause after it take that is not
answered."""


if __name__ == "__main__":
    typer.run(main)

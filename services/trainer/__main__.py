"""Runs the trainer. `python -m services.trainer` is one rank; `python -m services.trainer.launch --ranks N` starts all
of one host, and `torchrun --nproc-per-node N -m services.trainer` those of several hosts. SIGTERM drains: the running
step is finished, a checkpoint of it is written, the trainer leaves the fleet, and the exit status is 0.

torchrun gives its ranks 30 seconds to drain; `--shutdown-timeout` gives them more.
"""

import os

import typer

from millrace.service_process import VersionOption
from millrace.telemetry.metrics.prometheus.endpoint import MetricsPortOption
from millrace.wire.address import CoordinatorOption, HostOption, InsecureOption, advertise
from millrace.wire.membership import PartitionOption, work_in
from services.trainer.options import SILENT_S, PortOption, SilentOption, end_unprotected


def main(
    coordinator: CoordinatorOption,
    port: PortOption = 0,
    host: HostOption = "",
    partition: PartitionOption = "",
    silent_s: SilentOption = SILENT_S,
    metrics_port: MetricsPortOption = 0,
    insecure: InsecureOption = False,
    version: VersionOption = False,
) -> None:
    """Serves one trainer in front of a group of ranks."""
    advertise(host)
    work_in(partition)
    if os.environ.get("RANK", "0") == "0":  # the other ranks serve nobody
        end_unprotected(insecure)
    from services.trainer.rank import serve  # it imports torch

    raise typer.Exit(serve(coordinator, port, silent_s, metrics_port))


if __name__ == "__main__":
    typer.run(main)

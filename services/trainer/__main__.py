"""Runs the trainer. `python -m services.trainer` is one rank; `python -m services.trainer.launch --ranks N` starts all
of one host, and `torchrun --nproc-per-node N -m services.trainer` those of several hosts. SIGTERM drains: the running
step is finished, a checkpoint in progress is written, the trainer leaves the fleet, and the exit status is 0.

torchrun gives its ranks 30 seconds to drain; `--shutdown-timeout` gives them more.
"""

import os
import sys
from typing import Annotated

import typer

from millrace.errors import MillraceError
from millrace.service_process import VersionOption
from millrace.telemetry.metrics.prometheus.endpoint import MetricsPortOption
from millrace.wire.address import (
    CoordinatorOption,
    HostOption,
    InsecureOption,
    advertise,
    bind_address,
    host_address,
    require_protection,
)
from millrace.wire.membership import PartitionOption, work_in
from services.trainer.options import SILENT_S, SilentOption


def main(
    coordinator: CoordinatorOption,
    port: Annotated[
        int, typer.Option(envvar="MILLRACE_PORT", help="Port of the trainer's gRPC server; 0: a free port.")
    ] = 0,
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
    try:
        if os.environ.get("RANK", "0") == "0":  # the other ranks serve nobody
            require_protection(bind_address(host_address()), insecure=insecure)
    except MillraceError as error:
        print(f"trainer: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    from services.trainer.rank import serve  # it imports torch

    raise typer.Exit(serve(coordinator, port, silent_s, metrics_port))


if __name__ == "__main__":
    typer.run(main)

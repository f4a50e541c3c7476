"""`millrace up`: the local stack in the foreground."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from millrace.engines import ENGINE_NAMES
from millrace.local.options import StackOptions, pythons
from millrace.local.ports import free_port
from millrace.local.watchdog import watchdog


def up(
    replicas: Annotated[int, typer.Option(help="Number of rollout replicas.", min=0, max=64)] = 1,
    ranks: Annotated[int, typer.Option(help="Number of trainer ranks.", min=1, max=64)] = 1,
    engine: Annotated[
        str, typer.Option(help=f"Of the replicas: {', '.join(ENGINE_NAMES)}; or several with commas.")
    ] = "vllm",
    python: Annotated[
        list[str] | None,
        typer.Option(metavar="ENGINE=PATH", help="Python interpreter for replicas of an engine. Can be repeated."),
    ] = None,
    gpus_per_replica: Annotated[int, typer.Option(help="For engines that use several GPUs.", min=1)] = 1,
    share_gpus: Annotated[
        bool,
        typer.Option(help="Share GPUs if there are too few. The engines have to leave memory free."),
    ] = False,
    standby: Annotated[
        bool, typer.Option(help="Keep a second trainer process that has imported everything, about 0.4 GB.")
    ] = True,
    state: Annotated[
        Path, typer.Option(help="Folder for data and logs. A stack that is started on it again continues from there.")
    ] = Path("state"),
    http_host: Annotated[str, typer.Option(help="Address of the REST API; 0.0.0.0 allows other hosts.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="Port of the REST API; 0: a free port.")] = 7700,
    grpc_port: Annotated[int, typer.Option(help="Port at which the fleet registers; 0: a free port.")] = 7600,
    insecure: Annotated[
        bool, typer.Option("--insecure", envvar="MILLRACE_INSECURE", help="Serve other hosts without a token.")
    ] = False,
) -> None:
    """Start the whole system on this machine: coordinator with its Redis, trainer, replicas.

    The command stays in the foreground and shows warnings and errors of all services; the full logs are in STATE/logs.
    A service that dies is started again, a limited number of times. Ctrl-C stops all services in order and leaves no
    process behind; a second Ctrl-C does not wait.
    """
    from millrace.wire.address import require_protection  # imports gRPC

    require_protection(http_host, insecure=insecure)
    options = StackOptions(
        state=str(state.resolve()),
        replicas=replicas,
        ranks=ranks,
        engine=engine,
        pythons=pythons(python or []),
        gpus_per_replica=gpus_per_replica,
        share_gpus=share_gpus,
        standby=standby,
        http_host=http_host,
        http_port=http_port or free_port(),
        grpc_port=grpc_port or free_port(),
        insecure=insecure,
    )
    raise typer.Exit(watchdog((sys.executable, "-m", "millrace.local", "supervise", options.to_json())))

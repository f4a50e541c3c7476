"""Starts a rollout replica: `python -m services.rollout --coordinator host:7600 --engine vllm --port 0`."""

from typing import Annotated

import typer

from millrace.engines import ENGINE_NAMES
from millrace.service_process import VersionOption
from millrace.spec.pool import ROLLOUT
from millrace.telemetry.metrics.prometheus.endpoint import MetricsPortOption
from millrace.wire.address import CoordinatorOption, HostOption, InsecureOption, advertise
from millrace.wire.membership import PartitionOption, work_in
from services.rollout.nodes.place import NODE_LOST_S, LeaderOption, NodeLostOption, NodeRankOption, NodesOption

SessionsPortOption = Annotated[
    int,
    typer.Option(
        envvar="MILLRACE_SESSIONS_PORT",
        min=0,
        max=65_535,
        help="Port of its HTTP endpoint, for sessions of agents or replies of a pool; 0: a free port, which "
        "`millrace fleet` tells.",
    ),
]
app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    coordinator: CoordinatorOption,
    engine: Annotated[str, typer.Option(envvar="MILLRACE_ENGINE", help=f"One of {', '.join(ENGINE_NAMES)}.")] = "vllm",
    host: HostOption = "",
    port: Annotated[
        int, typer.Option(envvar="MILLRACE_PORT", help="Port of the replica's gRPC server; 0: a free port.")
    ] = 0,
    patience_s: Annotated[
        float, typer.Option(envvar="MILLRACE_PATIENCE_S", help="Seconds without a coordinator until the replica ends.")
    ] = 900.0,
    drain_s: Annotated[
        float, typer.Option(envvar="MILLRACE_DRAIN_S", help="Seconds to finish its leases when it is stopped.")
    ] = 600.0,
    stall_s: Annotated[
        float, typer.Option(envvar="MILLRACE_STALL_S", min=0.1, help="Seconds that the engine may take for one batch.")
    ] = 300.0,
    pool: Annotated[
        str, typer.Option(envvar="MILLRACE_POOL", help="Pool that it scores for; `rollout`: it generates.")
    ] = ROLLOUT,
    partition: PartitionOption = "",
    nodes: NodesOption = 1,
    node_rank: NodeRankOption = 0,
    leader: LeaderOption = "",
    node_lost_s: NodeLostOption = NODE_LOST_S,
    admit_by_cache: Annotated[
        bool,
        typer.Option(
            envvar="MILLRACE_ADMIT_BY_CACHE",
            help="Hold back episodes of several turns while the engine's cache is too small for all that are open.",
        ),
    ] = True,
    metrics_port: MetricsPortOption = 0,
    sessions_port: SessionsPortOption = 0,
    insecure: InsecureOption = False,
    version: VersionOption = False,
) -> None:
    """Serves one engine to the fleet until SIGTERM or SIGINT. A second signal ends it without waiting for leases."""
    advertise(host)
    work_in(partition)
    from services.rollout.process import Given, start  # what it imports takes seconds

    start(
        Given(
            coordinator=coordinator,
            engine=engine,
            port=port,
            patience_s=patience_s,
            drain_s=drain_s,
            stall_s=stall_s,
            pool=pool,
            nodes=nodes,
            node_rank=node_rank,
            leader=leader,
            node_lost_s=node_lost_s,
            admit_by_cache=admit_by_cache,
            metrics_port=metrics_port,
            sessions_port=sessions_port,
            insecure=insecure,
        )
    )


if __name__ == "__main__":
    app()

"""Starts a rollout replica: `python -m services.rollout --coordinator host:7600 --engine vllm --port 0`."""

from typing import Annotated

import typer

from millrace.service_process import VersionOption, option
from millrace.spec.pool import ROLLOUT
from millrace.telemetry.metrics.prometheus.endpoint import MetricsPortOption
from millrace.wire.address import CoordinatorOption, HostOption, InsecureOption, advertise
from millrace.wire.membership import PartitionOption, work_in
from services.rollout.nodes import place

SessionsPortOption = Annotated[
    int,
    option(
        "MILLRACE_SESSIONS_PORT",
        "Port of its HTTP endpoint, for sessions of agents or replies of a pool; 0: a free port, which "
        "`millrace fleet` tells.",
        min=0,
        max=65_535,
    ),
]
app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    coordinator: CoordinatorOption,
    engine: place.EngineOption = "vllm",
    host: HostOption = "",
    port: place.PortOption = 0,
    patience_s: Annotated[
        float, option("MILLRACE_PATIENCE_S", "Seconds without a coordinator until the replica ends.")
    ] = 900.0,
    drain_s: Annotated[float, option("MILLRACE_DRAIN_S", "Seconds to finish its leases when it is stopped.")] = 600.0,
    stall_s: Annotated[
        float, option("MILLRACE_STALL_S", "Seconds that the engine may take for one batch.", min=0.1)
    ] = 300.0,
    pool: Annotated[str, option("MILLRACE_POOL", "Pool that it scores for; `rollout`: it generates.")] = ROLLOUT,
    partition: PartitionOption = "",
    nodes: place.NodesOption = 1,
    node_rank: place.NodeRankOption = 0,
    leader: place.LeaderOption = "",
    node_lost_s: place.NodeLostOption = place.NODE_LOST_S,
    admit_by_cache: Annotated[
        bool,
        option(
            "MILLRACE_ADMIT_BY_CACHE",
            "Hold back episodes of several turns while the engine's cache is too small for all that are open.",
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

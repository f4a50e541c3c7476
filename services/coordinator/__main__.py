"""`python -m services.coordinator`: REST for people, gRPC for the fleet, all state in Redis."""

import asyncio
import os
from typing import TYPE_CHECKING

import typer

from millrace.errors import InvalidState
from millrace.service_process import VersionOption, collect_rarely, ends_with_message, stop_signal
from millrace.telemetry import logs
from millrace.telemetry.spans import export
from millrace.wire.address import InsecureOption, require_protection
from services.coordinator import options
from services.coordinator.state.member import Patience

if TYPE_CHECKING:
    from services.coordinator.process import Settings
    from services.coordinator.scaling.autoscaler import Scaling
    from services.coordinator.scaling.scalers import Scaler

app = typer.Typer(pretty_exceptions_enable=False)
KEPT_JOBS = 1000


@app.command()
def main(
    http_host: options.HttpHostOption = "127.0.0.1",
    http_port: options.HttpPortOption = 7700,
    grpc_host: options.GrpcHostOption = "127.0.0.1",
    grpc_port: options.GrpcPortOption = 7600,
    state_dir: options.StateOption = options.STATE,
    redis_url: options.RedisOption = "",
    heartbeat_s: options.HeartbeatOption = 1.0,
    lost_after_s: options.LostOption = 5.0,
    lease_s: options.LeaseOption = 3.0,
    insecure: InsecureOption = False,
    keep_jobs: options.KeepJobsOption = KEPT_JOBS,
    keep_jobs_days: options.KeepDaysOption = 0.0,
    delete_checkpoints: options.DeleteCheckpointsOption = False,
    autoscale: options.AutoscaleOption = "",
    scaler: options.ScalerOption = "local",
    replica_price: options.PriceOption = 0.0,
    replica_budget: options.BudgetOption = 0.0,
    scale_up_s: options.UpOption = 30.0,
    scale_down_s: options.DownOption = 300.0,
    jobs_per_user: options.JobsPerUserOption = 0,
    preempt_after_s: options.PreemptOption = 0.0,
    share_replicas_s: options.ShareOption = 0.0,
    webhook: options.WebhookOption = "",
    webhook_key: options.WebhookKeyOption = "",
    stalled_after_s: options.StalledOption = 3600.0,
    version: VersionOption = False,
) -> None:
    """Starts the coordinator. SIGTERM and SIGINT stop it; jobs continue when it is started again."""
    from services.coordinator.jobs.deletion import Retention
    from services.coordinator.process import Settings  # what it imports takes a second
    from services.coordinator.webhooks import own_webhook

    with ends_with_message("coordinator"):
        scaled = _scaling(autoscale, replica_price, replica_budget, scale_up_s, scale_down_s, scaler, share_replicas_s)
        settings = Settings(
            http_host,
            http_port,
            grpc_host,
            grpc_port,
            state_dir.expanduser(),
            redis_url,
            Patience(heartbeat_s, lost_after_s),
            Retention(keep_jobs, keep_jobs_days, delete_checkpoints),
            lease_s,
            scaled,
            jobs_per_user,
            preempt_after_s,
            share_replicas_s,
            own_webhook(webhook, webhook_key, stalled_after_s),
        )
        logs.configure("coordinator")
        export.configure("coordinator")
        require_protection(http_host, grpc_host, insecure=insecure)
        collect_rarely()
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_until_signalled(settings))


def _scaling(
    between: str, price: float, budget: float, up_s: float, down_s: float, kind: str, share_s: float
) -> "tuple[Scaler, Scaling] | None":
    """What scales the replicas, and how; None if nothing does. Raises MillraceError."""
    if not between:
        return None
    if share_s:
        what = "--share-replicas-s: is given together with --autoscale, which counts the replicas of one partition."
        raise InvalidState(what, "leave one of them out.")
    from services.coordinator.scaling.autoscaler import Scaling, limits
    from services.coordinator.scaling.decision import Pace
    from services.coordinator.scaling.scalers import scaler

    rules = Scaling(limits(between, price, budget), Pace(up_s=up_s, down_s=down_s))
    return scaler(kind, os.environ.get("MILLRACE_STACK_STATE", "")), rules


async def _until_signalled(settings: "Settings") -> None:
    from services.coordinator.process import Coordinator
    from services.coordinator.threads import Threads

    asyncio.get_running_loop().set_default_executor(Threads())
    await Coordinator(settings).run(stop_signal())


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop's event loop if it is installed: about twice as fast for small calls."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


if __name__ == "__main__":
    app()

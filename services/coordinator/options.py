"""Options of the coordinator and of its backup. Importing them is cheap: `--help` needs no more."""

from pathlib import Path
from typing import Annotated

import typer

STATE = Path("~/.millrace/coordinator")
HttpHostOption = Annotated[
    str, typer.Option(envvar="MILLRACE_HTTP_HOST", help="Address of the REST API; 0.0.0.0 allows other hosts.")
]
HttpPortOption = Annotated[int, typer.Option(envvar="MILLRACE_HTTP_PORT", help="Port of the REST API.")]
GrpcHostOption = Annotated[
    str, typer.Option(envvar="MILLRACE_GRPC_HOST", help="Address of the gRPC server; 0.0.0.0 allows other hosts.")
]
GrpcPortOption = Annotated[int, typer.Option(envvar="MILLRACE_GRPC_PORT", help="Port of the gRPC server.")]
HeartbeatOption = Annotated[
    float, typer.Option(envvar="MILLRACE_HEARTBEAT_S", help="Seconds between the heartbeats of a member.")
]
LostOption = Annotated[
    float, typer.Option(envvar="MILLRACE_LOST_AFTER_S", help="Seconds of silence after which a member is lost.")
]
StateOption = Annotated[Path, typer.Option(envvar="MILLRACE_STATE_DIR", help="Folder of the coordinator's own Redis.")]
RedisOption = Annotated[
    str, typer.Option(envvar="REDIS_URL", help="Address of Redis; empty: the coordinator's own, in --state-dir.")
]
AutoscaleOption = Annotated[
    str, typer.Option(envvar="MILLRACE_AUTOSCALE", metavar="MIN:MAX", help="Scales the replicas; empty: does not.")
]
ScalerOption = Annotated[
    str,
    typer.Option(
        envvar="MILLRACE_SCALER",
        help="What starts and stops replicas: local; slurm:SBATCH_ARGUMENTS; compose:[OPTIONS] SERVICE; "
        "kubernetes:[RESOURCE/]NAME; or none, if others read the metric.",
    ),
]
PriceOption = Annotated[float, typer.Option(envvar="MILLRACE_REPLICA_PRICE", help="Of one replica and hour.", min=0)]
BudgetOption = Annotated[
    float, typer.Option(envvar="MILLRACE_REPLICA_BUDGET", help="Of all replicas and hour; 0: no limit.", min=0)
]
UpOption = Annotated[
    float, typer.Option(envvar="MILLRACE_SCALE_UP_S", help="Least seconds between a change and more replicas.", min=1)
]
DownOption = Annotated[
    float,
    typer.Option(envvar="MILLRACE_SCALE_DOWN_S", help="Least seconds between a change and fewer replicas.", min=1),
]
JobsPerUserOption = Annotated[
    int,
    typer.Option(
        envvar="MILLRACE_JOBS_PER_USER",
        help="Most jobs of one user that are active at the same time; 0: no limit.",
        min=0,
        max=1000,
    ),
]
PreemptOption = Annotated[
    float,
    typer.Option(
        envvar="MILLRACE_PREEMPT_AFTER_S",
        help="Seconds that a job runs after each start before it gives way to one with schedule.preempt; 0: none does.",
        min=0,
    ),
]
ShareOption = Annotated[
    float,
    typer.Option(
        envvar="MILLRACE_SHARE_REPLICAS_S",
        help="Least seconds between two hand-overs of replicas to jobs of other partitions; 0: there are none.",
        min=0,
    ),
]
WebhookOption = Annotated[
    str,
    typer.Option(
        envvar="MILLRACE_WEBHOOK",
        metavar="URL",
        help="Gets a message when a job ends or stands still: a URL, or env:NAME or file:/path of it.",
    ),
]
WebhookKeyOption = Annotated[
    str,
    typer.Option(
        "--webhook-secret", envvar="MILLRACE_WEBHOOK_SECRET", help="env:NAME or file:/path of the key that signs."
    ),
]
StalledOption = Annotated[
    float,
    typer.Option(
        envvar="MILLRACE_STALLED_AFTER_S", help="Seconds without a step after which --webhook gets a message.", min=1.0
    ),
]
LeaseOption = Annotated[
    float,
    typer.Option(
        envvar="MILLRACE_LEADER_LEASE_S",
        help="Seconds after which a coordinator that stands by leads, if the leader is gone.",
        min=1.0,
        max=60.0,
    ),
]
KeepJobsOption = Annotated[
    int,
    typer.Option(
        envvar="MILLRACE_KEEP_JOBS",
        help="Jobs that have ended and are kept; of older ones only the output folders stay.",
        min=0,
        max=1_000_000,
    ),
]
KeepDaysOption = Annotated[
    float,
    typer.Option(
        envvar="MILLRACE_KEEP_JOBS_DAYS",
        help="Days for which a job that has ended is kept; 0: only --keep-jobs counts.",
        min=0,
        max=100_000,
    ),
]
DeleteCheckpointsOption = Annotated[
    bool,
    typer.Option(
        "--delete-checkpoints",
        envvar="MILLRACE_DELETE_CHECKPOINTS",
        help="Delete the checkpoints of the jobs that --keep-jobs and --keep-jobs-days delete.",
    ),
]

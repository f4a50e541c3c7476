"""Options of the coordinator and of its backup. Importing them is cheap: `--help` needs no more."""

from pathlib import Path
from typing import Annotated

from millrace.service_process import option

STATE = Path("~/.millrace/coordinator")
HttpHostOption = Annotated[str, option("MILLRACE_HTTP_HOST", "Address of the REST API; 0.0.0.0 allows other hosts.")]
HttpPortOption = Annotated[int, option("MILLRACE_HTTP_PORT", "Port of the REST API.")]
GrpcHostOption = Annotated[str, option("MILLRACE_GRPC_HOST", "Address of the gRPC server; 0.0.0.0 allows other hosts.")]
GrpcPortOption = Annotated[int, option("MILLRACE_GRPC_PORT", "Port of the gRPC server.")]
HeartbeatOption = Annotated[float, option("MILLRACE_HEARTBEAT_S", "Seconds between the heartbeats of a member.")]
LostOption = Annotated[float, option("MILLRACE_LOST_AFTER_S", "Seconds of silence after which a member is lost.")]
StateOption = Annotated[Path, option("MILLRACE_STATE_DIR", "Folder of the coordinator's own Redis.")]
RedisOption = Annotated[str, option("REDIS_URL", "Address of Redis; empty: the coordinator's own, in --state-dir.")]
AutoscaleOption = Annotated[
    str, option("MILLRACE_AUTOSCALE", "Scales the replicas; empty: does not.", metavar="MIN:MAX")
]
ScalerOption = Annotated[
    str,
    option(
        "MILLRACE_SCALER",
        "What starts and stops replicas: local; slurm:SBATCH_ARGUMENTS; compose:[OPTIONS] SERVICE; "
        "kubernetes:[RESOURCE/]NAME; or none, if others read the metric.",
    ),
]
PriceOption = Annotated[float, option("MILLRACE_REPLICA_PRICE", "Of one replica and hour.", min=0)]
BudgetOption = Annotated[float, option("MILLRACE_REPLICA_BUDGET", "Of all replicas and hour; 0: no limit.", min=0)]
UpOption = Annotated[float, option("MILLRACE_SCALE_UP_S", "Least seconds between a change and more replicas.", min=1)]
DownOption = Annotated[
    float, option("MILLRACE_SCALE_DOWN_S", "Least seconds between a change and fewer replicas.", min=1)
]
JobsPerUserOption = Annotated[
    int,
    option(
        "MILLRACE_JOBS_PER_USER",
        "Most jobs of one user that are active at the same time; 0: no limit.",
        min=0,
        max=1000,
    ),
]
PreemptOption = Annotated[
    float,
    option(
        "MILLRACE_PREEMPT_AFTER_S",
        "Seconds that a job runs after each start before it gives way to one with schedule.preempt; 0: none does.",
        min=0,
    ),
]
ShareOption = Annotated[
    float,
    option(
        "MILLRACE_SHARE_REPLICAS_S",
        "Least seconds between two hand-overs of replicas to jobs of other partitions; 0: there are none.",
        min=0,
    ),
]
WebhookOption = Annotated[
    str,
    option(
        "MILLRACE_WEBHOOK",
        "Gets a message when a job ends or stands still: a URL, or env:NAME or file:/path of it.",
        metavar="URL",
    ),
]
WebhookKeyOption = Annotated[
    str, option("MILLRACE_WEBHOOK_SECRET", "env:NAME or file:/path of the key that signs.", "--webhook-secret")
]
StalledOption = Annotated[
    float, option("MILLRACE_STALLED_AFTER_S", "Seconds without a step after which --webhook gets a message.", min=1.0)
]
LeaseOption = Annotated[
    float,
    option(
        "MILLRACE_LEADER_LEASE_S",
        "Seconds after which a coordinator that stands by leads, if the leader is gone.",
        min=1.0,
        max=60.0,
    ),
]
KeepJobsOption = Annotated[
    int,
    option(
        "MILLRACE_KEEP_JOBS",
        "Jobs that have ended and are kept; of older ones only the output folders stay.",
        min=0,
        max=1_000_000,
    ),
]
KeepDaysOption = Annotated[
    float,
    option(
        "MILLRACE_KEEP_JOBS_DAYS",
        "Days for which a job that has ended is kept; 0: only --keep-jobs counts.",
        min=0,
        max=100_000,
    ),
]
DeleteCheckpointsOption = Annotated[
    bool,
    option(
        "MILLRACE_DELETE_CHECKPOINTS",
        "Delete the checkpoints of the jobs that --keep-jobs and --keep-jobs-days delete.",
        "--delete-checkpoints",
    ),
]

"""Prometheus metrics of the coordinator. Values that the ledger knows are gauges that are set from it, so that they
survive a restart of the coordinator."""

from millrace.telemetry.metrics.declaration import Unit
from millrace.telemetry.metrics.prometheus.declaration import (
    CALLS_S,
    LONG_S,
    PUBLICATION_BUCKETS_S,
    SHORT_S,
    VERSIONS,
    counter,
    gauge,
    histogram,
)

# Jobs and their ledgers.
JOBS = gauge("millrace_jobs", Unit.COUNT, "Jobs by state.", "state")
JOB_STEP = gauge("millrace_job_step", Unit.STEP, "Steps that the job has trained.", "job_id")
JOB_VERSION = gauge("millrace_job_version", Unit.VERSIONS, "Version of the weights that the trainer holds.", "job_id")
JOB_REWARD = gauge("millrace_job_reward", Unit.REWARD, "Mean reward of the last step's trajectories.", "job_id")
JOB_EVALUATION = gauge(
    "millrace_job_evaluation_reward",
    Unit.REWARD,
    "Held-out score of the last evaluation: mean `acc`, or mean reward if the reward gives no `acc`.",
    "job_id",
)
JOB_EVALUATED = gauge(
    "millrace_job_evaluation_coverage",
    Unit.RATIO,
    "Part of the held-out prompts of the last evaluation that have a score.",
    "job_id",
)
PROMPTS = gauge(
    "millrace_prompts",
    Unit.COUNT,
    "Prompts by their place in the ledger: queued, leased, generated, trained, dropped.",
    "job_id",
    "where",
)
PROMPTS_DROPPED = gauge("millrace_prompts_dropped", Unit.COUNT, "Dropped prompts by reason.", "job_id", "reason")
QUEUE_DEPTH = gauge(
    "millrace_queue_depth_prompts", Unit.COUNT, "Prompts that wait for a lease. A measure for scaling replicas."
)

# Work.
LEASES = counter("millrace_leases_total", Unit.COUNT, "Leases given to replicas.", "job_id")
LEASES_EXPIRED = counter(
    "millrace_leases_expired_total",
    Unit.COUNT,
    "Leases that ended because their replica did not extend them.",
    "job_id",
)
LEASES_FENCED = counter(
    "millrace_leases_fenced_total",
    Unit.COUNT,
    "Answers that were refused because their lease had been given to another replica.",
    "job_id",
)
GROUPS = counter("millrace_groups_total", Unit.COUNT, "Groups that replicas completed.", "job_id")
TRAJECTORIES = counter(
    "millrace_trajectories_total",
    Unit.COUNT,
    "Trajectories that replicas completed, by the reason why generation stopped.",
    "job_id",
    "stop",
)
RESPONSE_TOKENS = counter(
    "millrace_response_tokens_total", Unit.TOKENS, "Response tokens that replicas sent.", "job_id"
)
STALENESS = histogram(
    "millrace_staleness_versions",
    Unit.VERSIONS,
    "Version that the trainer held less the oldest version in a trained trajectory.",
    VERSIONS,
    "job_id",
)

# Steps and publications.
STEP_S = histogram(
    "millrace_step_seconds",
    Unit.SECONDS,
    "Duration of a step: generation, training, weight update, and the whole.",
    LONG_S,
    "job_id",
    "part",
)
PUBLICATIONS = counter(
    "millrace_publications_total",
    Unit.COUNT,
    "Publications by sender (trainer, or sibling replica) and outcome.",
    "job_id",
    "source",
    "outcome",
)
PUBLICATION_S = histogram(
    "millrace_publication_seconds",
    Unit.SECONDS,
    "Duration of a publication by phase; verify includes the commit of replicas that do both in one call.",
    PUBLICATION_BUCKETS_S,
    "job_id",
    "source",
    "phase",
)
PUBLICATION_BYTES = counter(
    "millrace_publication_bytes_total",
    Unit.BYTES,
    "Bytes of the weights that were published, counted once a publication.",
    "job_id",
    "source",
)
PAUSE_S = histogram(
    "millrace_publication_pause_seconds",
    Unit.SECONDS,
    "Time in which a publication kept an engine from generating.",
    SHORT_S,
    "job_id",
)

# The fleet.
MEMBERS = gauge("millrace_members", Unit.COUNT, "Trainers and replicas by state.", "kind", "state")
EPOCH = gauge(
    "millrace_epoch", Unit.COUNT, "Epoch of the weight communicators; it grows when a member joins, leaves or is lost."
)
MEMBER_TOKENS_PER_S = gauge(
    "millrace_member_tokens_per_second",
    Unit.TOKENS_PER_SECOND,
    "Tokens that a member generates or trains, a second.",
    "member",
)
REPLICAS_WANTED = gauge(
    "millrace_replicas_wanted", Unit.COUNT, "Replicas that autoscaling wants. Absent without it.", "pool"
)
REPLICAS_READY = gauge("millrace_replicas_ready", Unit.COUNT, "Replicas that serve, as autoscaling sees them.", "pool")
SCALINGS = counter(
    "millrace_scalings_total", Unit.COUNT, "Decisions for another number of replicas, by reason.", "pool", "reason"
)

# What goes wrong, and how far a job is.
EVENTS = counter(
    "millrace_events_total",
    Unit.COUNT,
    "Events by kind, as `millrace events` shows them: rewinds, lost trainers, members that are out, warnings.",
    "job_id",
    "kind",
)
JOB_STEP_TIME = gauge(
    "millrace_job_step_timestamp_seconds",
    Unit.SECONDS,
    "Unix time at which an active job's last step was trained; before the first step that of its start.",
    "job_id",
)
JOB_CHECKPOINT_TIME = gauge(
    "millrace_job_checkpoint_timestamp_seconds",
    Unit.SECONDS,
    "Unix time of the step that an active job's newest checkpoint holds; before the first one that of its start.",
    "job_id",
)
JOB_NOT_FINITE = gauge(
    "millrace_job_not_finite_metrics",
    Unit.COUNT,
    "Step metrics of an active job's last step that are NaN or infinite.",
    "job_id",
)
JOB_MISMATCH_KL = gauge(
    "millrace_job_mismatch_kl_nats",
    Unit.NATS,
    "KL divergence of engine and trainer in an active job's last step: on tokens of the same version if there are "
    "any, otherwise on all.",
    "job_id",
)
DISK_FREE = gauge(
    "millrace_output_disk_free_bytes",
    Unit.BYTES,
    "Free space where an active job's output folder is, as the coordinator sees it.",
    "job_id",
)
DISK_SIZE = gauge("millrace_output_disk_size_bytes", Unit.BYTES, "Size of the disk of that folder.", "job_id")

# The coordinator's own work.
WEBHOOKS = counter(
    "millrace_webhooks_total",
    Unit.COUNT,
    "Messages to webhooks by outcome: delivered, or failed after the last attempt.",
    "outcome",
)
SPANS_DROPPED = counter(
    "millrace_spans_dropped_total",
    Unit.COUNT,
    "Spans that are not in the timeline, because a step had too many or they came too fast.",
)
HTTP_S = histogram(
    "millrace_http_seconds",
    Unit.SECONDS,
    "Time until the answer to a REST request begins, by method, route and status code.",
    CALLS_S,
    "method",
    "route",
    "code",
)
REDIS_S = histogram(
    "millrace_redis_seconds",
    Unit.SECONDS,
    "Duration of commands and scripts in Redis, with the way there and back.",
    SHORT_S,
)
REDIS_MEMORY = gauge("millrace_redis_memory_bytes", Unit.BYTES, "Memory that Redis uses. Absent if it does not say.")
REDIS_CLIENTS = gauge("millrace_redis_clients", Unit.COUNT, "Connections that Redis has. Absent if it does not say.")

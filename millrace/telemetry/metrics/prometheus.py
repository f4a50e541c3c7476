"""The Prometheus metrics that the coordinator serves at `/metrics`.

`LEASES.on(registry).labels(job=...).inc()` records one. Names end in their unit; `_total` counts since the process
started. Values that the ledger knows are gauges that are set from it, so they survive a restart of the coordinator.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.registry import Collector

from millrace.telemetry.metrics.catalogue import complain
from millrace.telemetry.metrics.declaration import Owner, Unit

Kind = TypeVar("Kind", Counter, Gauge, Histogram)

SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Buckets for pauses."""
LONG_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0)
"""Buckets for steps, publications and checkpoints."""
VERSIONS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
"""Buckets for staleness."""


@dataclass(frozen=True)
class PrometheusMetric(Generic[Kind]):
    """The declaration of one Prometheus metric."""

    kind: type[Kind]
    name: str
    unit: Unit
    meaning: str
    """One sentence; Prometheus shows it as the metric's help."""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = field(default=(), repr=False)
    owner: Owner = Owner.COORDINATOR
    """The coordinator serves all of them; trainer and replicas have no page for Prometheus."""

    def on(self, registry: CollectorRegistry) -> Kind:
        """This metric in `registry`. The first call creates it; later calls return the same object."""
        created = _created.setdefault(registry, {})
        if self.name not in created:
            buckets: dict[str, Any] = {"buckets": self.buckets} if self.buckets else {}
            created[self.name] = self.kind(self.name, self.meaning, self.labels, registry=registry, **buckets)
        return cast(Kind, created[self.name])


_created: MutableMapping[CollectorRegistry, dict[str, Counter | Gauge | Histogram]] = WeakKeyDictionary()


class DeclaredRegistry(CollectorRegistry):
    """A registry that complains about collectors whose metrics are not in `PROMETHEUS_METRICS`."""

    def register(self, collector: Collector) -> None:
        """Registers `collector`. Raises UndeclaredMetric in strict mode where one of its metrics is not declared."""
        for family in collector.collect():
            if family.name not in _FAMILIES:
                complain(family.name, "is not declared in millrace/telemetry/metrics/prometheus.py")
        super().register(collector)


# Jobs and their ledgers (coordinator).
JOBS = PrometheusMetric(Gauge, "millrace_jobs", Unit.COUNT, "Jobs by state.", ("state",))
JOB_STEP = PrometheusMetric(Gauge, "millrace_job_step", Unit.STEP, "Steps that the job has trained.", ("job",))
JOB_VERSION = PrometheusMetric(
    Gauge, "millrace_job_version", Unit.VERSIONS, "Version of the weights that the trainer holds.", ("job",)
)
JOB_REWARD = PrometheusMetric(
    Gauge, "millrace_job_reward", Unit.REWARD, "Mean reward of the last step's trajectories.", ("job",)
)
JOB_EVALUATION = PrometheusMetric(
    Gauge,
    "millrace_job_evaluation_reward",
    Unit.REWARD,
    "Mean reward on held-out prompts in the last evaluation.",
    ("job",),
)
PROMPTS = PrometheusMetric(
    Gauge,
    "millrace_prompts",
    Unit.COUNT,
    "Prompts by their place in the ledger: queued, leased, generated, trained, dropped.",
    ("job", "where"),
)
PROMPTS_DROPPED = PrometheusMetric(
    Gauge, "millrace_prompts_dropped", Unit.COUNT, "Dropped prompts by reason.", ("job", "reason")
)
QUEUE_DEPTH = PrometheusMetric(
    Gauge, "millrace_queue_depth_prompts", Unit.COUNT, "Prompts that wait for a lease. A measure for scaling replicas."
)

# Work (coordinator).
LEASES = PrometheusMetric(Counter, "millrace_leases_total", Unit.COUNT, "Leases given to replicas.", ("job",))
LEASES_EXPIRED = PrometheusMetric(
    Counter,
    "millrace_leases_expired_total",
    Unit.COUNT,
    "Leases that ended because their replica did not extend them.",
    ("job",),
)
LEASES_FENCED = PrometheusMetric(
    Counter,
    "millrace_leases_fenced_total",
    Unit.COUNT,
    "Answers that were refused because their lease had been given to another replica.",
    ("job",),
)
GROUPS = PrometheusMetric(Counter, "millrace_groups_total", Unit.COUNT, "Groups that replicas completed.", ("job",))
TRAJECTORIES = PrometheusMetric(
    Counter,
    "millrace_trajectories_total",
    Unit.COUNT,
    "Trajectories that replicas completed, by the reason why generation stopped.",
    ("job", "stop"),
)
RESPONSE_TOKENS = PrometheusMetric(
    Counter, "millrace_response_tokens_total", Unit.TOKENS, "Response tokens that replicas sent.", ("job",)
)
STALENESS = PrometheusMetric(
    Histogram,
    "millrace_staleness_versions",
    Unit.VERSIONS,
    "Version that the trainer held less the oldest version in a trained trajectory.",
    ("job",),
    VERSIONS,
)

# Steps and publications (coordinator).
STEP_S = PrometheusMetric(
    Histogram,
    "millrace_step_seconds",
    Unit.SECONDS,
    "Duration of a step: generation, training, weight update, and the whole.",
    ("job", "part"),
    LONG_S,
)
PUBLICATIONS = PrometheusMetric(
    Counter,
    "millrace_publications_total",
    Unit.COUNT,
    "Publications by sender (trainer, or sibling replica) and outcome.",
    ("job", "source", "outcome"),
)
PUBLICATION_S = PrometheusMetric(
    Histogram,
    "millrace_publication_seconds",
    Unit.SECONDS,
    "Duration of a publication by phase; verify includes the commit of replicas that do both in one call.",
    ("job", "source", "phase"),
    LONG_S,
)
PUBLICATION_BYTES = PrometheusMetric(
    Counter,
    "millrace_publication_bytes_total",
    Unit.BYTES,
    "Bytes of the weights that were published, counted once a publication.",
    ("job", "source"),
)
PAUSE_S = PrometheusMetric(
    Histogram,
    "millrace_publication_pause_seconds",
    Unit.SECONDS,
    "Time in which a publication kept an engine from generating.",
    ("job",),
    SHORT_S,
)

# The fleet (coordinator).
MEMBERS = PrometheusMetric(Gauge, "millrace_members", Unit.COUNT, "Trainers and replicas by state.", ("kind", "state"))
EPOCH = PrometheusMetric(
    Gauge,
    "millrace_epoch",
    Unit.COUNT,
    "Epoch of the weight communicators; it grows when a member joins, leaves or is lost.",
)
MEMBER_TOKENS_PER_S = PrometheusMetric(
    Gauge,
    "millrace_member_tokens_per_second",
    Unit.TOKENS_PER_SECOND,
    "Tokens that a member generates or trains, a second.",
    ("member",),
)

PROMETHEUS_METRICS: tuple[PrometheusMetric[Any], ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, PrometheusMetric)
)
"""Every declaration of this module."""
_FAMILIES = frozenset(metric.name.removesuffix("_total") for metric in PROMETHEUS_METRICS)

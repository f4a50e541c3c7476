"""The Prometheus metrics that the coordinator serves, by name, in one place.

They are made in a registry of its own: `STEPS.on(registry).labels(job=...).inc()`. Names end in their
unit; `_total` counts since the process started. Values that the ledger knows are gauges, set from it, so that they
survive a restart of the coordinator.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

Kind = TypeVar("Kind", Counter, Gauge, Histogram)

SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Buckets for pauses."""
LONG_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0)
"""Buckets for steps, publications and checkpoints."""
VERSIONS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
"""Buckets for staleness."""


@dataclass(frozen=True)
class Metric(Generic[Kind]):
    """A metric before it stands in a registry."""

    kind: type[Kind]
    name: str
    about: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = field(default=(), repr=False)

    def on(self, registry: CollectorRegistry = REGISTRY) -> Kind:
        """This metric in `registry`: made at the first call, the same object after it."""
        made = _made.setdefault(registry, {})
        if self.name not in made:
            shape: dict[str, Any] = {"buckets": self.buckets} if self.buckets else {}
            made[self.name] = self.kind(self.name, self.about, self.labels, registry=registry, **shape)
        return made[self.name]


_made: MutableMapping[CollectorRegistry, dict[str, Any]] = WeakKeyDictionary()

# Jobs and their ledgers (coordinator).
JOBS = Metric(Gauge, "millrace_jobs", "Jobs by state.", ("state",))
JOB_STEP = Metric(Gauge, "millrace_job_step", "Steps trained.", ("job",))
JOB_VERSION = Metric(Gauge, "millrace_job_version", "Weight version that the trainer holds.", ("job",))
JOB_REWARD = Metric(Gauge, "millrace_job_reward", "Mean reward of the last step's trajectories.", ("job",))
JOB_EVALUATION = Metric(Gauge, "millrace_job_evaluation_reward", "Held-out reward, last evaluation.", ("job",))
PROMPTS = Metric(
    Gauge, "millrace_prompts", "Prompts on the ledger: queued, leased, generated, trained, dropped.", ("job", "where")
)
PROMPTS_DROPPED = Metric(Gauge, "millrace_prompts_dropped", "Dropped prompts by reason.", ("job", "reason"))
QUEUE_DEPTH = Metric(Gauge, "millrace_queue_depth_prompts", "Prompts that wait for a lease; scale replicas on it.")

# Work (coordinator).
LEASES = Metric(Counter, "millrace_leases_total", "Leases given.", ("job",))
LEASES_EXPIRED = Metric(Counter, "millrace_leases_expired_total", "Leases lost to silence.", ("job",))
LEASES_FENCED = Metric(Counter, "millrace_leases_fenced_total", "Late answers refused by their fence.", ("job",))
GROUPS = Metric(Counter, "millrace_groups_total", "Groups completed.", ("job",))
TRAJECTORIES = Metric(Counter, "millrace_trajectories_total", "Trajectories completed.", ("job", "stop"))
RESPONSE_TOKENS = Metric(Counter, "millrace_response_tokens_total", "Response tokens received.", ("job",))
STALENESS = Metric(Histogram, "millrace_staleness_versions", "Staleness of trained trajectories.", ("job",), VERSIONS)

# Steps and publications (coordinator).
STEP_S = Metric(Histogram, "millrace_step_seconds", "Seconds of a step by part.", ("job", "part"), LONG_S)
PUBLICATIONS = Metric(
    Counter, "millrace_publications_total", "Publications by sender and outcome.", ("job", "source", "outcome")
)
PUBLICATION_S = Metric(
    Histogram, "millrace_publication_seconds", "Seconds of a publication by phase.", ("job", "source", "phase"), LONG_S
)
PUBLICATION_BYTES = Metric(Counter, "millrace_publication_bytes_total", "Bytes published.", ("job", "source"))
PAUSE_S = Metric(
    Histogram, "millrace_publication_pause_seconds", "Seconds that an engine stood still.", ("job",), SHORT_S
)

# The fleet (coordinator).
MEMBERS = Metric(Gauge, "millrace_members", "Members by kind and state.", ("kind", "state"))
EPOCH = Metric(Gauge, "millrace_epoch", "Membership epoch of the weight communicators.")
MEMBER_TOKENS_PER_S = Metric(Gauge, "millrace_member_tokens_per_second", "Tokens a second by member.", ("member",))

"""What the declaration of a Prometheus metric says."""

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from millrace.telemetry.metrics.declaration import Unit

Kind = TypeVar("Kind", Counter, Gauge, Histogram)

SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Buckets for pauses."""
PUBLICATION_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 30.0, 100.0)
"""Buckets for publications and their phases: 20 ms between GPUs of one host, minutes over a slow link."""
CALLS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Buckets for calls: most answer at once, a call for a training step when the step is done."""
LONG_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0)
"""Buckets for steps and checkpoints."""
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
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = field(default=(), repr=False)

    def on(self, registry: CollectorRegistry) -> Kind:
        """This metric in `registry`. The first call creates it; later calls return the same object."""
        created = _created.setdefault(registry, {})
        if self.name not in created:
            buckets: dict[str, Any] = {"buckets": self.buckets} if self.buckets else {}
            created[self.name] = self.kind(self.name, self.meaning, self.labels, registry=registry, **buckets)
        return cast(Kind, created[self.name])


_created: MutableMapping[CollectorRegistry, dict[str, Counter | Gauge | Histogram]] = WeakKeyDictionary()


def counter(name: str, unit: Unit, meaning: str, *labels: str) -> PrometheusMetric[Counter]:
    return PrometheusMetric(Counter, name, unit, meaning, labels)


def gauge(name: str, unit: Unit, meaning: str, *labels: str) -> PrometheusMetric[Gauge]:
    return PrometheusMetric(Gauge, name, unit, meaning, labels)


def histogram(
    name: str, unit: Unit, meaning: str, buckets: tuple[float, ...], *labels: str
) -> PrometheusMetric[Histogram]:
    return PrometheusMetric(Histogram, name, unit, meaning, labels, buckets)

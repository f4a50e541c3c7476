"""All declarations of Prometheus metrics by their owners, and the registry that takes no others."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from millrace.telemetry.metrics.catalogue import complain
from millrace.telemetry.metrics.declaration import Owner
from millrace.telemetry.metrics.prometheus import coordinator, every_service, members, replica, sessions, trainer
from millrace.telemetry.metrics.prometheus.declaration import PrometheusMetric


@dataclass(frozen=True)
class PrometheusSection:
    """The Prometheus metrics of the same owners, as docs/metrics.md has them."""

    heading: str
    introduction: str
    owners: tuple[Owner, ...]
    """The services that serve all of `metrics`."""
    metrics: tuple[PrometheusMetric[Any], ...]

    @classmethod
    def of(cls, heading: str, module: ModuleType, *owners: Owner) -> "PrometheusSection":
        """All declarations of a module."""
        declared = tuple(value for value in vars(module).values() if isinstance(value, PrometheusMetric))
        return cls(heading, module.__doc__ or "", owners, declared)


PROMETHEUS_SECTIONS = (
    PrometheusSection.of("Every service", every_service, *Owner),
    PrometheusSection.of("The coordinator", coordinator, Owner.COORDINATOR),
    PrometheusSection.of("Trainer and replicas", members, Owner.TRAINER, Owner.REPLICA),
    PrometheusSection.of("The trainer", trainer, Owner.TRAINER),
    PrometheusSection.of("A replica", replica, Owner.REPLICA),
    PrometheusSection.of("Sessions of agents", sessions, Owner.REPLICA),
)
_OWNERS: Mapping[str, tuple[Owner, ...]] = {
    metric.name.removesuffix("_total"): section.owners for section in PROMETHEUS_SECTIONS for metric in section.metrics
}


class DeclaredRegistry(CollectorRegistry):
    """A registry that complains about metrics that are not declared, or not as the metrics of its owner."""

    def __init__(self, owner: Owner) -> None:
        """`owner`: the service whose metrics it holds."""
        super().__init__()
        self._owner = owner

    def register(self, collector: Collector) -> None:
        """Registers `collector`. Raises UndeclaredMetric in strict mode if one of its metrics is not declared."""
        for family in collector.collect():
            if self._owner not in _OWNERS.get(family.name, ()):
                place = "millrace/telemetry/metrics/prometheus"
                complain(family.name, f"is not declared as a metric of the {self._owner} in {place}")
        super().register(collector)

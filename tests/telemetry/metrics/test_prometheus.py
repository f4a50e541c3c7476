"""The declarations of the Prometheus metrics, and the registry that takes no others."""

import re

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from millrace.telemetry.metrics.catalogue import STRICT, UndeclaredMetric
from millrace.telemetry.metrics.declaration import Owner, Unit
from millrace.telemetry.metrics.prometheus import coordinator as names
from millrace.telemetry.metrics.prometheus.registry import PROMETHEUS_SECTIONS, DeclaredRegistry

SUFFIXES = {Unit.SECONDS: "_seconds", Unit.BYTES: "_bytes", Unit.VERSIONS: ("_versions", "_version")}


def test_names_are_unique_prefixed_and_end_in_their_unit() -> None:
    metrics = [metric for section in PROMETHEUS_SECTIONS for metric in section.metrics]
    names = [metric.name for metric in metrics]
    assert len(names) == len(set(names)) > 20
    for metric in metrics:
        assert re.fullmatch(r"(millrace|process)_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is Counter)
        assert metric.name.removesuffix("_total").endswith(SUFFIXES.get(metric.unit, ""))
        assert metric.meaning.endswith(".")
        assert bool(metric.buckets) == (metric.kind is Histogram)


def test_a_metric_is_created_once_in_each_registry() -> None:
    for section in PROMETHEUS_SECTIONS:
        for owner in section.owners:
            one, other = DeclaredRegistry(owner), DeclaredRegistry(owner)
            for metric in section.metrics:
                assert metric.on(one) is metric.on(one)
                assert metric.on(one) is not metric.on(other)


def test_the_registry_of_a_service_refuses_the_metrics_of_another() -> None:
    with pytest.raises(UndeclaredMetric, match="millrace_leases"):
        names.LEASES.on(DeclaredRegistry(Owner.TRAINER))


def test_what_is_recorded_is_exposed_under_its_name() -> None:
    registry = CollectorRegistry()
    names.LEASES.on(registry).labels(job_id="job-1").inc(3)
    names.PAUSE_S.on(registry).labels(job_id="job-1").observe(0.02)
    text = generate_latest(registry).decode()
    assert 'millrace_leases_total{job_id="job-1"} 3.0' in text
    assert 'millrace_publication_pause_seconds_bucket{job_id="job-1",le="0.025"} 1.0' in text
    assert 'millrace_publication_pause_seconds_bucket{job_id="job-1",le="0.01"} 0.0' in text


@pytest.mark.parametrize("kind", [Counter, Gauge, Histogram])
def test_the_registry_refuses_an_undeclared_metric(kind: type[Counter | Gauge | Histogram]) -> None:
    with pytest.raises(UndeclaredMetric, match="millrace_invented"):
        kind("millrace_invented", "Nobody declared this.", registry=DeclaredRegistry(Owner.REPLICA))


def test_in_production_an_undeclared_metric_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STRICT)
    registry = DeclaredRegistry(Owner.REPLICA)
    Gauge("millrace_invented", "Nobody declared this.", registry=registry).set(2)
    assert "millrace_invented 2.0" in generate_latest(registry).decode()

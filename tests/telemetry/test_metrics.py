import re

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from millrace.telemetry import metrics

ALL = [value for value in vars(metrics).values() if isinstance(value, metrics.Metric)]


def test_names_are_unique_prefixed_and_counters_end_in_total() -> None:
    names = [metric.name for metric in ALL]
    assert len(names) == len(set(names)) > 20
    for metric in ALL:
        assert re.fullmatch(r"millrace_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is Counter)
        assert metric.about.endswith(".")
        assert bool(metric.buckets) == (metric.kind is Histogram)


def test_every_metric_can_be_made_once_a_registry_and_is_the_same_after() -> None:
    one, other = CollectorRegistry(), CollectorRegistry()
    for metric in ALL:
        assert metric.on(one) is metric.on(one)
        assert metric.on(one) is not metric.on(other)


def test_what_is_recorded_is_exposed_under_its_name() -> None:
    registry = CollectorRegistry()
    metrics.LEASES.on(registry).labels(job="job-1").inc(3)
    metrics.PAUSE_S.on(registry).labels(job="job-1").observe(0.02)
    text = generate_latest(registry).decode()
    assert 'millrace_leases_total{job="job-1"} 3.0' in text
    assert 'millrace_publication_pause_seconds_bucket{job="job-1",le="0.025"} 1.0' in text
    assert 'millrace_publication_pause_seconds_bucket{job="job-1",le="0.01"} 0.0' in text

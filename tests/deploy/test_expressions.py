"""Every metric and label of dashboards and alerts is declared. That each has data on the page of a real service is
asserted where the tests of the services have such a page: `without_data`."""

import re
import runpy

import pytest
import yaml
from prometheus_client import Counter, Histogram

from millrace.telemetry.metrics.declaration import Owner
from millrace.telemetry.metrics.prometheus.registry import PROMETHEUS_SECTIONS
from tests.deploy.expressions import (
    DEPLOY,
    OF_PROMETHEUS,
    OF_TARGETS,
    alerts,
    dashboards,
    expressions,
    lacking,
    selectors,
    without_data,
)

DECLARED = {metric.name: metric for section in PROMETHEUS_SECTIONS for metric in section.metrics}
EXPRESSIONS = [pytest.param(*one, id=f"{number} {one[0]}") for number, one in enumerate(expressions())]


@pytest.mark.parametrize(("name", "expression", "shown"), EXPRESSIONS)
def test_metrics_and_labels_are_declared(name: str, expression: str, shown: str) -> None:
    found = selectors(expression)
    assert found
    labels = set(OF_TARGETS)
    for selector in found:
        if selector.metric in OF_PROMETHEUS:
            assert {label for label, _, _ in selector.matchers} <= OF_TARGETS, selector
            continue
        metric = DECLARED[selector.metric]
        assert (metric.kind is Histogram) == (selector.sample != metric.name), selector
        assert {label for label, _, _ in selector.matchers} <= {*metric.labels, "le"}, selector
        labels |= {*metric.labels, "le"}
        grown = re.search(rf"(rate|increase)\({selector.sample}\b", expression)
        assert (grown is not None) == (metric.kind in (Counter, Histogram)), selector
    by = {
        label.strip()
        for group in re.findall(r"\b(?:by|ignoring|on) \(([^)]*)\)", expression)
        for label in group.split(",")
    }
    assert by | set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", shown)) <= labels
    assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")


def test_every_declared_metric_is_on_a_dashboard() -> None:
    shown = {
        s.metric
        for board in dashboards().values()
        for p in board["panels"]
        for t in p["targets"]
        for s in selectors(t["expr"])
    }
    assert set(DECLARED) - shown <= {"process_start_time_seconds", "process_virtual_memory_bytes"}


def test_labels_of_targets_do_not_hide_labels_of_metrics() -> None:
    for section in PROMETHEUS_SECTIONS:
        given = OF_TARGETS if section.owners != (Owner.COORDINATOR,) else OF_TARGETS - {"member"}
        for metric in section.metrics:
            assert not given & set(metric.labels) or metric.name == "millrace_member_info", metric


def test_a_page_without_a_series_is_told() -> None:
    (found,) = {one for one in without_data("", Owner.REPLICA) if one.startswith("millrace-fleet.json: Leases held")}
    assert "millrace_leases_held" in found
    page = "# TYPE millrace_leases_held gauge\nmillrace_leases_held 1\n"
    assert not [one for one in without_data(page, Owner.REPLICA) if "Leases held" in one]
    page = '# TYPE millrace_members gauge\nmillrace_members{kind="rollout",state="lost"} 1\n'
    assert [one for one in without_data(page, Owner.COORDINATOR) if one.startswith("NoReplica") and "members" in one]


def test_an_alert_on_what_is_not_scraped_is_told() -> None:
    other = '# TYPE up gauge\nup{job="node"} 1\n'
    assert len(lacking(other, OF_PROMETHEUS)) == 1 and lacking(other, OF_PROMETHEUS)[0].startswith("ServiceDown")
    assert lacking(other + 'up{job="millrace-members",role="trainer"} 0\n', OF_PROMETHEUS) == []


def test_the_files_are_those_of_the_description() -> None:
    for path, text in runpy.run_path(str(DEPLOY / "grafana/dashboards.py"), run_name="dashboards")["files"]().items():
        assert path.read_text() == text, "run `python deploy/grafana/dashboards.py`"
    assert len(dashboards()) == 4


def test_alerts_say_what_to_do_and_prometheus_reads_them() -> None:
    assert len({rule["alert"] for rule in alerts()}) == len(alerts()) > 10
    for rule in alerts():
        assert rule["annotations"]["fix"].endswith(".") and rule["labels"]["severity"] in ("warning", "critical")
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    assert [(DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"]] == [True]
    assert all(scraped["job_name"].startswith("millrace-") for scraped in config["scrape_configs"])

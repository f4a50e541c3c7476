"""The expressions of all dashboards and alerts, and which of their series a service's page lacks."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from millrace.telemetry.metrics.declaration import Owner
from millrace.telemetry.metrics.prometheus.registry import PROMETHEUS_SECTIONS

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SELECTOR = re.compile(r"\b((?:millrace|process)_[a-z_]+|up(?=\{))(\{[^}]*\})?")
MATCHER = re.compile(r"(\w+)(=~|!=|=)\"([^\"]*)\"")
NEEDS_GPU = frozenset(
    {
        "millrace_rank_gpu_memory_bytes",
        "millrace_gpu_busy_ratio",
        "millrace_gpu_memory_used_bytes",
        "millrace_gpu_memory_size_bytes",
        "millrace_gpu_power_watts",
        "millrace_gpu_temperature_celsius",
    }
)
"""Metrics that a service has on a GPU only."""
OF_JUDGES = frozenset(
    {"millrace_judge_down_seconds", "millrace_judge_waiting_requests", "millrace_judge_requests_total"}
)
"""Metrics that a replica has while its job has a judge."""
OF_AUTOSCALING = frozenset({"millrace_replicas_wanted", "millrace_replicas_ready", "millrace_scalings_total"})
"""Metrics that a coordinator has if it scales replicas."""
OF_PROMETHEUS = frozenset({"up"})
"""Metrics that Prometheus makes of its own reading: `tests/deploy/scrape.py` makes them as it does."""
OF_TARGETS = frozenset({"job", "instance", "role", "member"})
"""Labels that Prometheus gives to every series, by deploy/prometheus/prometheus.yml."""


@dataclass(frozen=True)
class Selector:
    """A metric in an expression, with its conditions on labels."""

    sample: str
    matchers: tuple[tuple[str, str, str], ...]

    @property
    def metric(self) -> str:
        """Name of the metric's declaration."""
        return re.sub("_(bucket|sum|count)$", "", self.sample)

    def takes(self, labels: Mapping[str, str]) -> bool:
        """Whether a series with these labels shows that the selector has data. A dashboard's variable selects
        everything; where failures alone are selected (`!=`), a series of the others shows it."""
        return all(_matches(labels.get(name, ""), how, wanted) for name, how, wanted in self.matchers)


def _matches(text: str, how: str, wanted: str) -> bool:
    if wanted.startswith("$") or how == "!=":
        return True
    return re.fullmatch(wanted, text) is not None if how == "=~" else text == wanted


def dashboards() -> Mapping[str, Any]:
    """The dashboards by the name of their files."""
    return {path.name: json.loads(path.read_text()) for path in sorted((DEPLOY / "grafana/dashboards").glob("*.json"))}


def alerts() -> list[dict[str, Any]]:
    """The rules of all alerts."""
    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str, str]]:
    """Each expression with the name of its panel or alert, and with the text that is shown for it."""
    for name, board in dashboards().items():
        for panel in board["panels"]:
            for line in panel["targets"]:
                yield f"{name}: {panel['title']}", line["expr"], line["legendFormat"]
    for rule in alerts():
        yield rule["alert"], rule["expr"], " ".join(rule["annotations"].values())


def selectors(expression: str) -> list[Selector]:
    """The metrics of an expression."""
    found = SELECTOR.findall(expression)
    return [Selector(sample, tuple(MATCHER.findall(conditions))) for sample, conditions in found]


def without_data(page: str, owner: Owner, absent: frozenset[str] = NEEDS_GPU | OF_JUDGES | OF_AUTOSCALING) -> list[str]:
    """The panels and alerts that look at a metric of the service `owner` of which its `page` has no series, but for
    those of metrics that may be `absent`."""
    owned = {m.name for section in PROMETHEUS_SECTIONS if owner in section.owners for m in section.metrics}
    return lacking(page, owned - absent)


def lacking(page: str, metrics: Collection[str]) -> list[str]:
    """The panels and alerts that look at one of `metrics` of which `page` has no series."""
    samples: dict[str, list[Mapping[str, str]]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample.labels)
    return [
        f"{name}: {selector.sample}{selector.matchers}"
        for name, expression, _ in expressions()
        for selector in selectors(expression)
        if selector.metric in metrics and not any(map(selector.takes, samples.get(selector.sample, [])))
    ]

"""`python docs/metrics_page.py > docs/metrics.md`: every metric that is declared."""

from collections.abc import Sequence
from typing import Any

from millrace.telemetry.metrics.catalogue import SECTIONS
from millrace.telemetry.metrics.declaration import PLACEHOLDERS, StepMetric
from millrace.telemetry.metrics.histograms import BINS, STEP_HISTOGRAMS, STEPS_KEPT, StepHistogram
from millrace.telemetry.metrics.prometheus.declaration import PrometheusMetric
from millrace.telemetry.metrics.prometheus.registry import PROMETHEUS_SECTIONS

INTRODUCTION = """# Metrics

Made by `python docs/metrics_page.py > docs/metrics.md` from the declarations in `millrace/telemetry/metrics`: correct
a declaration, not this page.

There are two kinds. **Step metrics** are the values of one step of one job: one row a step, kept by the coordinator,
read with `millrace show`, `GET /v1/jobs/{id}/metrics` or `Client.metrics`, and sent to the job's experiment trackers.
Row 0 has the evaluation before training. Their names are verl's where verl has the same number.
**Prometheus metrics** are about a service: the coordinator serves those of jobs and fleet at `/metrics` on the REST
port, the trainer and each replica their own at a port that `millrace fleet` tells
([running.md](running.md#prometheus)). Times are seconds and sizes bytes; `_total` counts since the process started.

The *owner* is the service that measures the value."""
FAMILIES = """A key with a part in braces stands for a family of keys:

| part | what replaces it |
|---|---|"""

HISTOGRAMS = f"""Each step also leaves histograms of values of its batch. `GET /v1/jobs/{{id}}/histograms` reads them
and the page draws them. They have up to {BINS} bins between the least and the greatest value of the step; those of
ratios have the same bins in every step. The coordinator keeps those of a job's last {STEPS_KEPT:,} steps."""


def page() -> str:
    """The whole page, in Markdown."""
    families = [_row(f"`{{{name}}}`", part.meaning) for name, part in PLACEHOLDERS.items()]
    parts = [INTRODUCTION, "## Step metrics", "\n".join([FAMILIES, *families])]
    parts += [
        f"### {section.heading}\n\n{section.introduction.strip()}\n\n{_step_table(section.metrics)}"
        for section in SECTIONS
    ]
    parts += [f"## Histograms\n\n{HISTOGRAMS}\n\n{_histogram_table(STEP_HISTOGRAMS)}", "## Prometheus metrics"]
    parts += [
        f"### {section.heading}\n\n{section.introduction.strip()}\n\n{_prometheus_table(section.metrics)}"
        for section in PROMETHEUS_SECTIONS
    ]
    return "\n\n".join(parts) + "\n"


def _step_table(metrics: Sequence[StepMetric]) -> str:
    rows = ["| key | unit | owner | meaning |", "|---|---|---|---|"]
    return "\n".join([*rows, *(_row(f"`{m.key}`", m.unit, m.owner, m.meaning) for m in metrics)])


def _histogram_table(histograms: Sequence[StepHistogram]) -> str:
    rows = ["| key | unit | owner | meaning |", "|---|---|---|---|"]
    return "\n".join([*rows, *(_row(f"`{h.key}`", h.unit, h.owner, h.meaning) for h in histograms)])


def _prometheus_table(metrics: Sequence[PrometheusMetric[Any]]) -> str:
    rows = ["| name | type | labels | unit | meaning |", "|---|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        kind = metric.kind.__name__.lower()
        rows.append(_row(f"`{metric.name}`", kind, labels, metric.unit, metric.meaning))
    return "\n".join(rows)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    print(page(), end="")

"""Makes the Grafana dashboards from a short description: `python deploy/grafana/dashboards.py` writes the JSON files.

Every panel has its unit and the PromQL of its lines. A test compares each expression with the pages of real services.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "dashboards"
WIDTH, HEIGHT, COLUMNS = 8, 8, 3
"""Size of a panel in Grafana's grid of 24 columns, and panels in a row."""
RATE = "[$__rate_interval]"
JOB = 'job_id=~"$job_id"'

FAILED_CALLS = 'millrace_grpc_seconds_count{code!="OK"}'


@dataclass(frozen=True)
class Panel:
    """A chart over time. `lines`: PromQL by the text of the legend."""

    title: str
    unit: str
    """Grafana's name of the unit: `s`, `bytes`, `short`, `percentunit`."""
    lines: Mapping[str, str]


@dataclass(frozen=True)
class Dashboard:
    """One page. `variables`: the metric whose label of that name offers the choices at the top."""

    uid: str
    title: str
    panels: Sequence[Panel]
    variables: Mapping[str, str]


def quantile(share: float, metric: str, by: str = "", matchers: str = "") -> str:
    """PromQL for a quantile of a histogram."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{{{matchers}}}{RATE})))"


OVERVIEW = Dashboard(
    "millrace-overview",
    "Millrace: overview",
    (
        Panel("Jobs", "short", {"{{state}}": "millrace_jobs"}),
        Panel("Members", "short", {"{{kind}} {{state}}": "millrace_members"}),
        Panel("Prompts that wait for a lease", "short", {"queue": "millrace_queue_depth_prompts"}),
        Panel("Response tokens a second", "short", {"{{job_id}}": f"rate(millrace_response_tokens_total{RATE})"}),
        Panel("Seconds since the last step", "s", {"{{job_id}}": "time() - millrace_job_step_timestamp_seconds"}),
        Panel(
            "Setbacks an hour",
            "short",
            {
                "{{job_id}} {{kind}}": "increase(millrace_events_total"
                '{kind=~"job.rewound|trainer.lost|member.out|publication.failed|checkpoint.failed"}[1h]) > 0'
            },
        ),
        Panel(
            "Space left for the output",
            "percentunit",
            {"{{job_id}}": "millrace_output_disk_free_bytes / millrace_output_disk_size_bytes"},
        ),
        Panel("REST, 95 %", "s", {"{{method}} {{route}}": quantile(0.95, "millrace_http_seconds", "method, route")}),
        Panel("Redis, 95 %", "s", {"commands and scripts": quantile(0.95, "millrace_redis_seconds")}),
        Panel("Redis memory", "bytes", {"used": "millrace_redis_memory_bytes"}),
        Panel(
            "Spans that were dropped, a minute", "short", {"spans": f"60 * rate(millrace_spans_dropped_total{RATE})"}
        ),
        Panel(
            "Webhook messages an hour",
            "short",
            {"{{outcome}}": "sum by (outcome) (increase(millrace_webhooks_total[1h]))"},
        ),
        Panel("Redis connections", "short", {"connections": "millrace_redis_clients"}),
        Panel("Releases", "short", {"{{service}} {{release}}": "count by (service, release) (millrace_build_info)"}),
    ),
    {},
)
A_JOB = Dashboard(
    "millrace-job",
    "Millrace: a job",
    (
        Panel(
            "Reward",
            "short",
            {
                "training": f"millrace_job_reward{{{JOB}}}",
                "held-out": f"millrace_job_evaluation_reward{{{JOB}}}",
            },
        ),
        Panel(
            "Held-out prompts with a score",
            "percentunit",
            {"of the last evaluation": f"millrace_job_evaluation_coverage{{{JOB}}}"},
        ),
        Panel("Steps", "short", {"step": f"millrace_job_step{{{JOB}}}", "version": f"millrace_job_version{{{JOB}}}"}),
        Panel(
            "A step, mean",
            "s",
            {
                "{{part}}": f"rate(millrace_step_seconds_sum{{{JOB}}}{RATE})"
                f" / rate(millrace_step_seconds_count{{{JOB}}}{RATE})"
            },
        ),
        Panel("Prompts", "short", {"{{where}}": f"millrace_prompts{{{JOB}}}"}),
        Panel("Dropped prompts", "short", {"{{reason}}": f"millrace_prompts_dropped{{{JOB}}} > 0"}),
        Panel(
            "Answers a second by their end", "short", {"{{stop}}": f"rate(millrace_trajectories_total{{{JOB}}}{RATE})"}
        ),
        Panel(
            "Staleness",
            "short",
            {
                "median": quantile(0.5, "millrace_staleness_versions", "", JOB),
                "99 %": quantile(0.99, "millrace_staleness_versions", "", JOB),
            },
        ),
        Panel(
            "Leases a second",
            "short",
            {
                "given": f"rate(millrace_leases_total{{{JOB}}}{RATE})",
                "expired": f"rate(millrace_leases_expired_total{{{JOB}}}{RATE})",
                "answered too late": f"rate(millrace_leases_fenced_total{{{JOB}}}{RATE})",
                "groups": f"rate(millrace_groups_total{{{JOB}}}{RATE})",
            },
        ),
        Panel("KL divergence of engine and trainer", "short", {"nats": f"millrace_job_mismatch_kl_nats{{{JOB}}}"}),
        Panel("Metrics that are not finite", "short", {"metrics": f"millrace_job_not_finite_metrics{{{JOB}}}"}),
        Panel("Age of the checkpoint", "s", {"age": f"time() - millrace_job_checkpoint_timestamp_seconds{{{JOB}}}"}),
        Panel("Events a minute", "short", {"{{kind}}": f"60 * rate(millrace_events_total{{{JOB}}}{RATE}) > 0"}),
    ),
    {"job_id": "millrace_job_step"},
)
FLEET = Dashboard(
    "millrace-fleet",
    "Millrace: fleet",
    (
        Panel("Tokens a second", "short", {"{{member}}": "millrace_member_tokens_per_second"}),
        Panel(
            "Tokens a second, told by the members", "short", {"{{member}}": f"rate(millrace_member_tokens_total{RATE})"}
        ),
        Panel(
            "Samples in the engines",
            "short",
            {
                "{{member}} running": "millrace_engine_running_samples",
                "{{member}} waiting": "millrace_engine_waiting_samples",
            },
        ),
        Panel(
            "Share of an engine's slots in use",
            "percentunit",
            {"{{member}}": "millrace_engine_running_samples / (millrace_engine_capacity_samples > 0)"},
        ),
        Panel(
            "Engine's cache of keys and values in use",
            "percentunit",
            {"{{member}}": "millrace_engine_cache_used_ratio"},
        ),
        Panel("Slots of an engine that are used", "short", {"{{member}}": "millrace_engine_used_slots"}),
        Panel(
            "Preemptions of an engine a second",
            "short",
            {"{{member}}": f"rate(millrace_engine_preemptions_total{RATE})"},
        ),
        Panel(
            "Share of prompt tokens in the prefix cache",
            "percentunit",
            {
                "{{member}}": f"rate(millrace_engine_cached_prompt_tokens_total{RATE})"
                f" / (rate(millrace_engine_prompt_tokens_total{RATE}) > 0)"
            },
        ),
        Panel(
            "Episodes that go on, are held back, and may go on",
            "short",
            {
                "{{member}} go on": "millrace_open_episodes",
                "{{member}} held back": "millrace_held_back_episodes",
                "{{member}} limit": "millrace_episode_limit",
            },
        ),
        Panel(
            "Share of earlier turns in the prefix cache",
            "percentunit",
            {
                "{{member}}": f"rate(millrace_episode_cached_prefix_tokens_total{RATE})"
                f" / (rate(millrace_episode_prefix_tokens_total{RATE}) > 0)"
            },
        ),
        Panel("Leases held", "short", {"{{member}}": "millrace_leases_held"}),
        Panel("Draining", "short", {"{{member}}": "millrace_replica_draining"}),
        Panel("Judges that do not answer", "s", {"{{judge}} {{member}}": "millrace_judge_down_seconds"}),
        Panel("Requests to judges", "short", {"{{judge}} {{member}}": "millrace_judge_waiting_requests"}),
        Panel(
            "Requests to judges a second",
            "short",
            {"{{judge}} {{outcome}}": f"sum by (judge, outcome) (rate(millrace_judge_requests_total{RATE}))"},
        ),
        Panel(
            "Sessions of agents",
            "short",
            {"{{member}} open": "millrace_sessions_open", "{{member}} unclaimed": "millrace_sessions_waiting"},
        ),
        Panel(
            "Requests of agents a second",
            "short",
            {"{{api}} {{status}}": f"sum by (api, status) (rate(millrace_session_requests_total{RATE}))"},
        ),
        Panel(
            "Claims without a session (429) a second",
            "short",
            {"{{member}}": f'rate(millrace_session_requests_total{{api="claim",status="429"}}{RATE})'},
        ),
        Panel(
            "Overhead of a turn in a session",
            "s",
            {
                "median": quantile(0.5, "millrace_session_overhead_seconds"),
                "99 %": quantile(0.99, "millrace_session_overhead_seconds"),
            },
        ),
        Panel("Sessions abandoned an hour", "short", {"{{member}}": "increase(millrace_sessions_abandoned_total[1h])"}),
        Panel("Versions", "short", {"{{member}}": "millrace_member_version"}),
        Panel("What members work on", "short", {"{{member}} {{engine}} {{job_id}}": "millrace_member_info"}),
        Panel("Epoch", "short", {"epoch": "millrace_epoch"}),
        Panel("Silence of ranks", "s", {"rank {{rank}}": "millrace_rank_silent_seconds"}),
        Panel("CPUs of ranks", "short", {"rank {{rank}}": f"rate(millrace_rank_cpu_seconds_total{RATE})"}),
        Panel("Host memory of ranks", "bytes", {"rank {{rank}}": "millrace_rank_resident_memory_bytes"}),
        Panel("GPU memory of ranks", "bytes", {"rank {{rank}} {{kind}}": "millrace_rank_gpu_memory_bytes"}),
        Panel("Ranks", "short", {"ranks": "millrace_trainer_ranks"}),
        Panel("GPUs busy", "percentunit", {"{{host}} GPU {{gpu}}": "millrace_gpu_busy_ratio"}),
        Panel(
            "GPU memory in use, of all processes",
            "percentunit",
            {"{{host}} GPU {{gpu}}": "millrace_gpu_memory_used_bytes / millrace_gpu_memory_size_bytes"},
        ),
        Panel("GPU power", "watt", {"{{host}} GPU {{gpu}}": "millrace_gpu_power_watts"}),
        Panel("GPU temperature", "celsius", {"{{host}} GPU {{gpu}}": "millrace_gpu_temperature_celsius"}),
        Panel("Memory of services", "bytes", {"{{role}} {{instance}}": "process_resident_memory_bytes"}),
        Panel("CPUs of services", "short", {"{{role}} {{instance}}": f"rate(process_cpu_seconds_total{RATE})"}),
        Panel("Open files", "percentunit", {"{{role}} {{instance}}": "process_open_fds / process_max_fds"}),
        Panel("gRPC, 95 %", "s", {"{{method}}": quantile(0.95, "millrace_grpc_seconds", "method")}),
        Panel(
            "gRPC calls that failed, a second",
            "short",
            {"{{method}} {{code}}": f"sum by (method, code) (rate({FAILED_CALLS}{RATE})) > 0"},
        ),
        Panel(
            "Replicas that autoscaling wants, and that serve",
            "short",
            {"{{pool}}: wanted": "millrace_replicas_wanted", "{{pool}}: serve": "millrace_replicas_ready"},
        ),
        Panel(
            "Decisions of autoscaling an hour",
            "short",
            {"{{pool}}: {{reason}}": "sum by (pool, reason) (increase(millrace_scalings_total[1h]))"},
        ),
    ),
    {},
)
PUBLICATION = Dashboard(
    "millrace-publication",
    "Millrace: publication",
    (
        Panel(
            "Publications a minute",
            "short",
            {"{{source}} {{outcome}}": f"60 * rate(millrace_publications_total{{{JOB}}}{RATE})"},
        ),
        Panel(
            "Phases, median",
            "s",
            {"{{source}} {{phase}}": quantile(0.5, "millrace_publication_seconds", "source, phase", JOB)},
        ),
        Panel(
            "Phases, 99 %",
            "s",
            {"{{source}} {{phase}}": quantile(0.99, "millrace_publication_seconds", "source, phase", JOB)},
        ),
        Panel("Bytes a second", "Bps", {"{{source}}": f"rate(millrace_publication_bytes_total{{{JOB}}}{RATE})"}),
        Panel(
            "Pause of generation",
            "s",
            {
                "median": quantile(0.5, "millrace_publication_pause_seconds", "", JOB),
                "99 %": quantile(0.99, "millrace_publication_pause_seconds", "", JOB),
            },
        ),
        Panel(
            "Phases of each member, mean",
            "s",
            {
                "{{member}} {{phase}}": f"rate(millrace_member_publication_seconds_sum{RATE})"
                f" / rate(millrace_member_publication_seconds_count{RATE})"
            },
        ),
        Panel(
            "Bytes a second on each member's wire",
            "Bps",
            {
                "{{member}}": f"rate(millrace_member_publication_bytes_total{RATE}) / ignoring (phase) "
                f'rate(millrace_member_publication_seconds_sum{{phase="wire"}}{RATE})'
            },
        ),
        Panel(
            "Failed publications an hour",
            "short",
            {"{{job_id}}": 'increase(millrace_events_total{kind="publication.failed"}[1h])'},
        ),
    ),
    {"job_id": "millrace_job_step"},
)
DASHBOARDS = (OVERVIEW, A_JOB, FLEET, PUBLICATION)


def grafana(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    source = {"type": "prometheus", "uid": "${source}"}
    choices: list[dict[str, Any]] = [{"name": "source", "type": "datasource", "query": "prometheus", "label": "Source"}]
    choices += [
        {
            "name": name,
            "label": name,
            "type": "query",
            "datasource": source,
            "query": f"label_values({metric}, {name})",
            "refresh": 2,
            "includeAll": True,
            "multi": True,
        }
        for name, metric in dashboard.variables.items()
    ]
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["millrace"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": choices},
        "panels": [_chart(number, panel, source) for number, panel in enumerate(dashboard.panels)],
    }


def _chart(number: int, panel: Panel, source: Mapping[str, str]) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0 if panel.unit != "short" else None}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": expression, "legendFormat": legend}
            for at, (legend, expression) in enumerate(panel.lines.items())
        ],
    }


def files() -> dict[Path, str]:
    """The text of each file."""
    return {FOLDER / f"{one.uid}.json": json.dumps(grafana(one), indent=2) + "\n" for one in DASHBOARDS}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in files().items():
        path.write_text(text)
        print(path, file=sys.stderr)

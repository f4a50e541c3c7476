"""Every alert fires on series that mean what it says, with its texts filled in, and not on those of a healthy job.

Needs `promtool`, which comes with Prometheus (Debian's package `prometheus` has it)."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.expressions import DEPLOY, alerts

PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus")
JOB = 'job_id="j"'
RUNNING = 'millrace_jobs{state="running"}'
EVENTS = "millrace_events_total"
BUCKET = "millrace_redis_seconds_bucket"
DOWN = 'up{job="millrace-members",instance="a:9",role="rollout",member="r-1"}'


@dataclass(frozen=True)
class Case:
    """Series in promtool's notation, a value a minute. Both sets hold at `at`."""

    fires: dict[str, str]
    healthy: dict[str, str]
    at: str
    labels: dict[str, str]
    value: str = ""
    """What the texts show of the value."""


def of_members(kind: str) -> Case:
    serving = f'millrace_members{{kind="{kind}",state="serving"}}'
    return Case({serving: "0x10", RUNNING: "1x10"}, {serving: "1x10", RUNNING: "1x10"}, "5m", {})


def of_events(kind: str, count: int, at: str, shown: str = "") -> Case:
    name = f'{EVENTS}{{{JOB},kind="{kind}"}}'
    labels = {"job_id": "j", "kind": kind}
    return Case({name: f"0x2 {count}x70"}, {name: f"{count}x70"}, at, labels, shown)


def of_job(metric: str, fires: str, healthy: str, at: str, value: str) -> Case:
    name = f"millrace_job_{metric}{{{JOB}}}"
    return Case({name: fires}, {name: healthy}, at, {"job_id": "j"}, value)


DISK = [f"millrace_output_disk_{which}_bytes{{{JOB}}}" for which in ("free", "size")]
CASES = {
    "StepStalled": of_job("step_timestamp_seconds", "0x60", "0+60x60", "40m", "40m 0s"),
    "NoReplica": of_members("rollout"),
    "NoTrainer": of_members("trainer"),
    "CheckpointOld": of_job("checkpoint_timestamp_seconds", "0x300", "0+60x300", "250m", "4h 10m 0s"),
    "CheckpointFailed": of_events("checkpoint.failed", 1, "10m"),
    "MetricsNotFinite": of_job("not_finite_metrics", "2x5", "0x5", "1m", "2"),
    "MismatchKl": of_job("mismatch_kl_nats", "0.05x30", "0.001x30", "15m", "0.05"),
    "OutputDiskFull": Case(
        {DISK[0]: "5x10", DISK[1]: "100x10"}, {DISK[0]: "50x10", DISK[1]: "100x10"}, "5m", {"job_id": "j"}, "5%"
    ),
    "TrainerLostOften": of_events("trainer.lost", 4, "60m", "4"),
    "ReplicasLostOften": of_events("member.out", 7, "60m", "7"),
    "PublicationsFail": of_events("publication.failed", 5, "15m", "5"),
    "RankSilent": Case(
        {'millrace_rank_silent_seconds{rank="3",host="h"}': "20x5"},
        {'millrace_rank_silent_seconds{rank="3",host="h"}': "1x5"},
        "1m",
        {"rank": "3", "host": "h"},
        "20",
    ),
    "RedisSlow": Case(
        {f'{BUCKET}{{le="{le}"}}': f"0+{count}x20" for le, count in (("0.1", 0), ("0.3", 60), ("+Inf", 60))},
        {f'{BUCKET}{{le="{le}"}}': f"0+{count}x20" for le, count in (("0.1", 60), ("0.3", 60), ("+Inf", 60))},
        "12m",
        {},
        "0.29",
    ),
    "ServiceDown": Case(
        {DOWN: "0x5"},
        {DOWN: "1x5"},
        "2m",
        {"job": "millrace-members", "instance": "a:9", "role": "rollout", "member": "r-1"},
    ),
}


def filled_in(text: str, case: Case) -> str:
    """A text of an alert as a person reads it."""
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: case.labels[found[1]], text)
    return re.sub(r"\{\{ [^}]*\$value[^}]* \}\}", case.value, text)


def cases_of(rule: dict[str, Any]) -> list[dict[str, Any]]:
    case = CASES[rule["alert"]]
    expected = {
        "exp_labels": {**case.labels, **rule["labels"]},
        "exp_annotations": {name: filled_in(text, case) for name, text in rule["annotations"].items()},
    }
    return [
        {
            "interval": "1m",
            "input_series": [{"series": series, "values": values} for series, values in given.items()],
            "alert_rule_test": [{"eval_time": case.at, "alertname": rule["alert"], "exp_alerts": alarms}],
        }
        for given, alarms in ((case.fires, [expected]), (case.healthy, []))
    ]


def promtool(*arguments: str) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_reads_its_configuration() -> None:
    promtool("check", "config", str(DEPLOY / "prometheus/prometheus.yml"))


def test_every_alert_fires_when_it_has_to_and_only_then(tmp_path: Path) -> None:
    assert set(CASES) == {rule["alert"] for rule in alerts()}
    tests = [test for rule in alerts() for test in cases_of(rule)]
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(DEPLOY / "prometheus/alerts.yml")], "tests": tests}))
    promtool("test", "rules", str(file))

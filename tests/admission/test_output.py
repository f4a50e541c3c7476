"""Placeholders of `output`."""

import time
from typing import Any

import pytest

from millrace.admission.submission import RUNS, with_output
from millrace.errors import InvalidJob
from millrace.ids import JobId
from millrace.spec import parse

TREE: dict[str, Any] = {"name": "my sums", "model": {"path": "/m"}, "data": {"files": ["/d.jsonl"]}}


def test_without_an_output_a_job_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNS, "/data/runs")
    assert with_output(parse(TREE), JobId("job-1")).output == "/data/runs/my-sums-job-1"
    monkeypatch.delenv(RUNS)
    monkeypatch.setenv("HOME", "/home/ada")
    assert with_output(parse(TREE), JobId("job-1")).output == "/home/ada/millrace/runs/my-sums-job-1"


def test_placeholders_stand_for_name_id_and_day() -> None:
    spec = parse(TREE | {"output": "/runs/{date}/{name}/{id}"})
    assert with_output(spec, JobId("job-1")).output == f"/runs/{time.strftime('%Y-%m-%d')}/my-sums/job-1"
    plain = parse(TREE | {"output": "/runs/a"})
    assert with_output(plain, JobId("job-1")) is plain


def test_other_braces_are_refused() -> None:
    with pytest.raises(InvalidJob, match=r"\{seed\} stands for nothing. Fix: use \{name\}, \{id\}, \{date\}, \{runs\}"):
        parse(TREE | {"output": "/runs/{seed}"})

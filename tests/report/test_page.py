"""The file of a report: the browser runs the one script and loads nothing, and texts of users and models stay data."""

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millrace.cli import app
from millrace.cli.show import write
from millrace.client import Client
from millrace.errors import InvalidState, NotFound
from millrace.events import Event
from millrace.report import KEYS_AT_ONCE, MOST_IMAGE_BYTES, STATIC, JobReport, gather, report_page
from millrace.rest import BandView, ImageView, MetricView, SeriesView, StepMetrics
from tests.report.contents import HOSTILE, a_job, a_publication, contents, events_of, hostile_contents
from tests.test_trackers import a_sample


class Read(HTMLParser):
    """What a browser would find: the tags with their attributes, and the text of each."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.tags[-1][0] if self.tags else "", data))

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def text(self, tag: str) -> list[str]:
        return [data for of, data in self.texts if of == tag and data.strip()]

    def data(self) -> Any:
        return json.loads(self.text("script")[0])


def test_hostile_texts_stay_data() -> None:
    page = report_page(hostile_contents())
    page.encode()  # it can be written
    found = Read(page)
    assert [tag for tag, _ in found.tags] == [
        *(
            "html",
            "head",
            "meta",
            "meta",
            "meta",
            "meta",
            "title",
            "style",
            "body",
            "noscript",
            "div",
            "script",
            "script",
        )
    ]
    names = {name for _, attributes in found.tags for name in attributes}
    assert names <= {"lang", "charset", "http-equiv", "content", "name", "id", "type"}
    data = found.data()
    assert data["job"]["name"] == data["events"][0]["message"] == data["groups"][0]["samples"][0]["answer"] == HOSTILE
    assert found.text("script")[0].isascii() and not set("<>&") & set(found.text("script")[0])


def test_the_browser_may_run_this_script_alone_and_load_nothing() -> None:
    page = report_page(contents("plain", [0.5], []))
    found = Read(page)
    (policy,) = (a["content"] for _, a in found.tags if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.split(" ", 1) for rule in str(policy).split("; "))
    (style,), (_, script) = found.text("style"), found.text("script")
    for name, text in (("script-src", script), ("style-src", style)):
        assert rules.pop(name) == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    assert rules.pop("img-src") == "data:"
    assert rules == dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    assert page.index("Content-Security-Policy") < page.index("<style>") < page.index("<script")
    addresses = re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}[\w./-]*", page)
    assert not {address for address in addresses if "www.w3.org" not in address}


def test_the_script_carries_the_licenses_of_what_it_contains() -> None:
    script = (STATIC / "report.js").read_text()
    assert script.count("Permission is hereby granted") == 2


def test_values_that_are_not_finite_are_in_the_data() -> None:
    data = Read(report_page(contents("plain", [0.5, math.inf, math.nan], []))).data()
    assert data["series"]["metrics"]["plain"]["mean"] == [0.5, "Infinity", "NaN"]


def test_a_job_that_has_not_begun_has_a_report_too() -> None:
    assert Read(report_page(contents("plain", [], []))).data()["keys"] == []


def answering(monkeypatch: pytest.MonkeyPatch, known: JobReport, **changed: Any) -> None:
    """Clients answer with what `known` has."""
    publication = Event(id="2-0", time_s=0.0, message="published", data=a_publication("plain"))
    answers = {
        "job": known.job,
        "metrics": [known.last] if known.last else [],
        "metric_keys": known.keys,
        "series": known.series,
        "histograms": known.histograms,
        "ledger": known.ledger,
        "events": [*known.events, publication],
        "spec": known.spec,
        "fleet": known.fleet,
        "diagnosis": NotFound("no step has spans or metrics.", "wait."),
    } | changed

    def method(answer: Any) -> Any:
        def call(self: Client, *arguments: Any, **named: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer(*arguments, **named) if callable(answer) else answer

        return call

    for name, answer in answers.items():
        monkeypatch.setattr(Client, name, method(answer))
    samples = [sample for group in known.groups for sample in reversed(group.samples)]
    monkeypatch.setattr(Client, "samples", lambda self, job, limit: samples[:limit])


def test_all_metrics_come_in_few_requests_and_routine_events_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [MetricView(key=f"own/{n}", section="Others", unit="", meaning="") for n in range(2 * KEYS_AT_ONCE + 1)]
    asked: list[int] = []

    def series(job_id: str, names: list[str], last: int) -> SeriesView:
        asked.append(len(names))
        assert last == 3
        curve = BandView(mean=[1.0], least=[], greatest=[])
        return SeriesView(steps=[1], time_s=[0.0], tokens=[1.0], metrics=dict.fromkeys(names, curve))

    last = StepMetrics(step=3, time_s=0.0, values={})
    known = contents("plain", [0.5], [a_sample(2, answer="b"), a_sample(2, answer="a"), a_sample(1)])
    answering(monkeypatch, known.model_copy(update={"keys": keys, "last": last}), series=series)
    with Client("http://127.0.0.1:1", token="none") as client:
        found = gather(client, "job-0123456789ab", samples=2)
    assert asked == [KEYS_AT_ONCE, KEYS_AT_ONCE, 1] and list(found.series.metrics) == [key.key for key in keys]
    assert found.events == events_of("plain") and [one.version for one in found.publications] == [3]
    assert [[one.answer for one in group.samples] for group in found.groups] == [["a", "b"]]
    assert found.diagnosis is None and found.last == last


def test_images_of_prompts_are_carried_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def image(number: int, size: int) -> ImageView:
        return ImageView(media_type="image/png", width=1, height=1, bytes=size, sha256=f"{number}" * 64)

    def answered(job_id: str, prompt_id: str, number: int, sha256: str) -> bytes:
        if sha256.startswith("2"):
            raise NotFound("it is gone.", "bring it back.")
        return b"file"

    shown = a_sample(1).model_copy(update={"images": [image(1, 4), image(2, 4), image(3, MOST_IMAGE_BYTES)]})
    known = contents("plain", [0.5], [shown, shown])
    answering(monkeypatch, known, image=answered)
    with Client("http://127.0.0.1:1", token="none") as client:
        found = gather(client, "job-0123456789ab", samples=2)
    assert found.images == {"1" * 64: f"data:image/png;base64,{base64.b64encode(b'file').decode()}"}
    assert found.missing_images["2" * 64] == "it is gone. Fix: bring it back."
    assert "at most 16,777,216 bytes" in found.missing_images["3" * 64] and len(found.missing_images) == 2


def test_the_command_writes_the_file_and_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = contents("plain", [0.5], [a_sample(1)])
    answering(monkeypatch, known)
    target = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["report", known.job.id, "-o", str(target)])
    assert result.exit_code == 0 and str(target) in result.stdout
    assert Read(target.read_text()).data()["groups"]
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["report", known.job.id, "--samples", "0"]).exit_code == 0
    assert not Read((tmp_path / f"{a_job('plain').id}.html").read_text()).data()["groups"]


def test_a_file_that_cannot_be_written_is_refused_with_the_fix(tmp_path: Path) -> None:
    for path in (tmp_path / "absent" / "report.html", tmp_path):
        with pytest.raises(InvalidState, match="--output") as refused:
            write(path, b"text")
        assert refused.value.fix
    assert not list(tmp_path.iterdir())

"""The page of a report: what it has, and that texts of users and models stay texts."""

import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millrace.cli import app
from millrace.cli.show import write
from millrace.client import Client
from millrace.drops import DropReason
from millrace.errors import InvalidState
from millrace.events import CheckpointSaved, Event, MemberTransfer, PublicationDone, TrackerFailed
from millrace.report.contents import Contents
from millrace.report.markup import visible
from millrace.report.page import report_page
from millrace.report.tables import fields_by_origin
from millrace.rest import FleetView, JobState, JobView, LedgerView, SampleView, StepMetrics
from tests.terminal.test_watch import REPLICA
from tests.test_trackers import a_sample

HOSTILE = (
    '<script>alert(1)</script></pre></style><img src=x onerror="alert(2)">"\'&amp;]]><!-- \x00\x1b\u202e\u2028 \ud800 x'
)
ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "main", "header", "section", "h1", "h2", "h3", "p", "span"),
    *("dl", "dt", "dd", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "pre", "code", "div"),
    *("figure", "figcaption", "svg", "polyline", "polygon", "circle", "line", "text"),
}


class Read(HTMLParser):
    """What a browser would find: the tags with their attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")


def a_job(text: str = "a job", **changes: Any) -> JobView:
    spec = {"name": text, "output": "/out", "model": {"path": "/model"}, text: {text: [text]}}
    job = JobView(
        id="job-0123456789ab",
        name=text,
        state=JobState.FAILED,
        step=3,
        steps=60,
        version=3,
        reward=0.5,
        created_s=0.0,
        failure=text,
        spec=spec,
    )
    return job.model_copy(update=changes)


def a_publication(text: str) -> PublicationDone:
    seconds = dict.fromkeys(("prepare_s", "gather_s", "verify_s", "apply_s"), 0.1)
    sizes = {"bytes": 2_000_000, **dict.fromkeys(("loader_tensors", "loader_bytes", "staging_bytes"), 0)}
    tree = {"member": text, "wire_s": 0.5, "mode": 1, "loader_names": [], **seconds, **sizes}
    members = [MemberTransfer.model_validate({**tree, "pause_s": pause_s}) for pause_s in (0.0, 0.25)]
    return PublicationDone(
        version=3,
        epoch=1,
        attempt=1,
        source="trainer",
        failures=0,
        seconds=1.5,
        phases={text: 0.75},
        receivers=1,
        members=members,
    )


def contents(text: str, rows: list[StepMetrics], samples: list[SampleView]) -> Contents:
    payloads = [
        TrackerFailed(tracker=text),
        CheckpointSaved(step=2, path=text, bytes=None, seconds=None),
        a_publication(text),
    ]
    return Contents(
        time_s=0.0,
        job=a_job(text),
        ledger=LedgerView(
            issued=10, queued=1, leased=2, generated=3, trained=1, dropped=3, reasons={DropReason.NO_SIGNAL: 3}
        ),
        metrics=rows,
        events=[Event(id="1-0", time_s=0.0, message=text, data=data) for data in payloads],
        samples=samples,
        fleet=FleetView(epoch=1, trainers=[], replicas=[REPLICA.model_copy(update={"id": text, "device": text})]),
    )


def test_hostile_texts_stay_texts() -> None:
    turn = {"given": "g", "given_tokens": 1, "sampled_tokens": 1, "reward": 0.0, "stop_reason": "", "versions": []}
    texts = ("prompt", "answer", "reward_failure", "member", "prompt_id", "stop_reason", "purpose")
    told = dict.fromkeys(texts, HOSTILE)
    samples = [
        a_sample(1).model_copy(update={**told, "ground_truth": HOSTILE}),
        a_sample(2).model_copy(update={**told, "ground_truth": {HOSTILE: HOSTILE}}),
        SampleView.model_validate(a_sample(3).model_dump() | {"turns": [{**turn, "answer": "<b>"}]}),
    ]
    rows = [StepMetrics(step=1, time_s=0.0, values={HOSTILE: 0.5, f"val-core/{HOSTILE}/reward/mean@1": 0.5})]
    page = report_page(contents(HOSTILE, rows, samples))
    page.encode()  # it can be written
    found = Read(page)
    assert {tag for tag, _ in found.tags} <= ALLOWED
    names = {name for _, attributes in found.tags for name in attributes}
    assert not {name for name in names if name.startswith("on")} and not names & {"href", "src", "style", "xlink:href"}
    assert found.text.count(visible(HOSTILE)) >= 15
    assert "default-src 'none'" in page and "http://" not in page and "https://" not in page


def test_what_cannot_be_seen_is_written_out() -> None:
    assert visible("a\x00\x1b[31m\u202e\ud800\tb\n") == "a\\x00\\x1b[31m\\u202e\\ud800\tb\n"


def test_curves_tables_and_samples_are_there() -> None:
    rows = [
        StepMetrics(
            step=step,
            time_s=0.0,
            values={
                "critic/rewards/mean": step / 60,
                "critic/rewards/min": 0.0,
                "critic/rewards/max": 1.0,
                "actor/grad_norm": math.inf if step == 3 else 1e300 * step,
                "timing_s/gen": 1.0,
                "timing_s/train": 2.0,
                "timing_s/update_weights": 0.02,
                "of/a/user": -1e308 if step % 2 else 1e308,
                **({"val-core/math/reward/mean@1": 0.125} if step == 0 else {}),
            },
        )
        for step in range(60)
    ]
    page = report_page(
        contents(
            "plain", rows, [a_sample(3, answer="four"), a_sample(3, answer="4 or so", reward=0.0, advantage=-0.625)]
        )
    )
    found = Read(page)
    labels = [str(attributes["aria-label"]) for tag, attributes in found.tags if tag == "svg"]
    assert any(label.startswith("critic/rewards/mean: 0 in step 0, 0.9833 in step 59, lowest 0,") for label in labels)
    assert any(label.count(";") == 2 and "publish: 0.02" in label for label in labels)
    assert sum(tag == "polygon" for tag, _ in found.tags) == 2  # the band, among the main curves and among all
    assert sum(attributes.get("class") == "broken" for _, attributes in found.tags) == 2
    polylines = [str(attributes["points"]) for tag, attributes in found.tags if tag == "polyline"]
    numbers = [float(number) for line in polylines for number in line.replace(",", " ").split()]
    assert all(math.isfinite(number) and 0 <= number <= 380 for number in numbers)
    for told in ("no_signal", "0.750", "GB/s", "four", "rewards 0, 1", "rollout-0", "0.125", "-0.625", "plain"):
        assert told in found.text, told


def test_a_job_that_has_not_begun_has_a_page_too() -> None:
    none = contents("plain", [], [])
    assert "No step has been trained yet." in report_page(none)


def test_fields_with_their_defaults_stand_apart() -> None:
    from millrace.spec import parse

    tree = {
        "name": "test",
        "output": "/out",
        "model": {"path": "/model"},
        "data": {"files": ["/rows.jsonl"]},
        "rollout": {"max_response_tokens": 8},
        "trainer": {"token_budget": 4096, "optimizer": {"lr": 3e-6}},
    }
    given, defaults = fields_by_origin(parse(tree).model_dump(mode="json"))
    assert given["trainer.optimizer.lr"] == 3e-6 and given["trainer.token_budget"] == 4096
    assert defaults["schedule.max_staleness"] == 1 and not set(given) & set(defaults)
    assert fields_by_origin({"from": {"another": "release"}}) == ({"from.another": "release"}, {})


def test_the_command_writes_the_file_and_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [StepMetrics(step=1, time_s=0.0, values={"critic/rewards/mean": 0.5})]
    known = contents("plain", rows, [a_sample(1)])
    answers = {"job": known.job, "ledger": known.ledger, "metrics": rows, "events": known.events, "fleet": known.fleet}
    for name, answer in answers.items():
        monkeypatch.setattr(Client, name, lambda self, *a, _answer=answer, **k: _answer)
    monkeypatch.setattr(Client, "samples", lambda self, job, limit: known.samples[:limit])
    target = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["report", known.job.id, "-o", str(target)])
    assert result.exit_code == 0 and str(target) in result.stdout
    assert "Samples" in Read(target.read_text()).text
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["report", known.job.id, "--samples", "0"]).exit_code == 0
    assert "Samples" not in Read((tmp_path / f"{known.job.id}.html").read_text()).text


def test_a_file_that_cannot_be_written_is_refused_with_the_fix(tmp_path: Path) -> None:
    for path in (tmp_path / "absent" / "report.html", tmp_path):
        with pytest.raises(InvalidState, match="--output") as refused:
            write(path, "text")
        assert refused.value.fix
    assert not list(tmp_path.iterdir())

"""The report of a job: one HTML file that needs no network and draws with the page's own code.

`gather` asks the coordinator for everything; `report_page` writes it into a file with the script and the style sheet in
`static/`, which `make web` builds from `web/`.
"""

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from pydantic import BaseModel, Field

from millrace.client import Client
from millrace.errors import NotFound
from millrace.events import Event, EventKind, PublicationDone
from millrace.rest import (
    FleetView,
    GroupView,
    HistogramView,
    JobView,
    LedgerView,
    MetricView,
    SampleView,
    SeriesView,
    SpecView,
    StepMetrics,
)
from millrace.rest.diagnosis import DiagnosisView

MOST_EVENTS = 2000
MOST_PUBLICATIONS = 50
MOST_IMAGE_BYTES = 16 << 20
"""The image files of a report have at most so many bytes in all. Encoded, they are a third larger."""
KEYS_AT_ONCE = 50
"""Metrics whose curves one request asks for: their names are in its address."""
ROUTINE = (EventKind.STEP_DONE, EventKind.PUBLICATION_DONE)
"""Kinds of events that the curves and the table of publications show."""
STATIC = Path(__file__).parent / "static"
"""Built from `web/` by `make web`."""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript>A script inside this file draws the report. Allow scripts to see it.</noscript>
<div id="page"></div>
<script type="application/json" id="report">{data}</script>
<script>{script}</script>
</body>
</html>
"""


class JobReport(BaseModel):
    """A job as it was at one time."""

    time_s: float = Field(description="Unix time.")
    job: JobView
    last: StepMetrics | None = Field(description="Metrics of the last step; null before there is one.")
    keys: list[MetricView]
    series: SeriesView = Field(description="Curves of all `keys`.")
    histograms: list[HistogramView]
    diagnosis: DiagnosisView | None = Field(description="What slows the job down; null before the first step.")
    groups: list[GroupView] = Field(description="The newest first.")
    images: dict[str, str] = Field(
        {}, description="Images of the prompts of `groups` as data URLs, by the hash of the file."
    )
    missing_images: dict[str, str] = Field({}, description="Why an image is not in `images`, by the hash of its file.")
    ledger: LedgerView
    publications: list[PublicationDone] = Field(description="The newest ones, the last one first.")
    events: list[Event] = Field(description="The newest ones in their order, without steps and publications.")
    spec: SpecView
    fleet: FleetView = Field(description="All members of the coordinator.")


def gather(client: Client, job_id: str, samples: int) -> JobReport:
    """Asks for the job with at most `samples` of its newest samples. Raises NotFound, Unavailable."""
    job = client.job(job_id)
    keys, rows = client.metric_keys(job_id), client.metrics(job_id, after_step=max(-1, job.step - 2))
    events = list(client.events(job_id, follow=False))
    publications = [event.data for event in events if isinstance(event.data, PublicationDone)]
    groups = groups_of(client.samples(job_id, limit=samples) if samples else [])
    images, missing = _images(client, job_id, groups)
    return JobReport(
        time_s=time.time(),
        job=job,
        last=rows[-1] if rows else None,
        keys=keys,
        series=_series(client, job, [metric.key for metric in keys]),
        histograms=client.histograms(job_id, job.step),
        diagnosis=_diagnosis(client, job),
        groups=groups,
        images=images,
        missing_images=missing,
        ledger=client.ledger(job_id),
        publications=publications[-MOST_PUBLICATIONS:][::-1],
        events=[event for event in events if event.kind not in ROUTINE][-MOST_EVENTS:],
        spec=client.spec(job_id),
        fleet=client.fleet(),
    )


def _series(client: Client, job: JobView, keys: Sequence[str]) -> SeriesView:
    """All curves up to the job's step at the time of the report: their points are of the same steps."""
    whole = SeriesView(steps=[], time_s=[], tokens=[], metrics={})
    for start in range(0, len(keys), KEYS_AT_ONCE):
        part = client.series(job.id, keys[start : start + KEYS_AT_ONCE], last=job.step)
        whole = part.model_copy(update={"metrics": whole.metrics | part.metrics})
    return whole


def _diagnosis(client: Client, job: JobView) -> DiagnosisView | None:
    """None if the job has no steps that could be judged."""
    try:
        return client.diagnosis(job.id) if job.step else None
    except NotFound:
        return None


def _images(client: Client, job_id: str, groups: Sequence[GroupView]) -> tuple[dict[str, str], dict[str, str]]:
    """The images of the groups' prompts as data URLs, and why others are left out; both by their hash."""
    found, missing, room = dict[str, str](), dict[str, str](), MOST_IMAGE_BYTES
    shown = [(group.prompt_id, *each) for group in groups for each in enumerate(group.samples[0].images, 1)]
    for prompt_id, number, image in shown:
        if image.sha256 in found:
            continue
        if image.bytes > room:
            missing[image.sha256] = f"left out: the images of a report have at most {MOST_IMAGE_BYTES:,} bytes"
            continue
        try:
            file = client.image(job_id, prompt_id, number, image.sha256)
        except NotFound as error:
            missing[image.sha256] = str(error)
            continue
        room -= len(file)
        found[image.sha256] = f"data:{image.media_type};base64,{base64.b64encode(file).decode()}"
    return found, {digest: why for digest, why in missing.items() if digest not in found}


def groups_of(samples: Sequence[SampleView]) -> list[GroupView]:
    """The samples, of which the newest is the first, by their prompts."""
    groups = [list(own)[::-1] for _, own in groupby(samples, key=lambda one: (one.step, one.purpose, one.prompt_id))]
    return [
        GroupView(
            step=own[0].step,
            prompt_id=own[0].prompt_id,
            purpose=own[0].purpose,
            data_source=own[0].data_source,
            samples=own,
        )
        for own in groups
    ]


def report_page(report: JobReport) -> str:
    """The whole file. The browser runs the one script, whose hash the file names, and opens no connection. Texts of
    users and models lie in a block of data that they cannot end."""
    script, style = ((STATIC / name).read_text(encoding="utf-8") for name in ("report.js", "report.css"))
    policy = (
        f"default-src 'none'; script-src '{_source(script)}'; style-src '{_source(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    title = escape(f"{report.job.name} · Millrace")
    return PAGE.format(policy=policy, title=title, style=style, data=_block(report), script=script)


def _source(text: str) -> str:
    """The hash by which a Content-Security-Policy allows a script or a style sheet."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _block(report: JobReport) -> str:
    """JSON in ASCII without `<`, `>` and `&`: nothing in it can end the block or begin a comment."""
    text = json.dumps(report.model_dump(mode="json"), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

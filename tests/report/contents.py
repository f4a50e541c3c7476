"""The contents of a report, with any text in every place that users and models fill."""

from collections.abc import Sequence

from millrace.drops import DropReason
from millrace.events import CheckpointSaved, Event, MemberTransfer, PublicationDone, TrackerFailed
from millrace.report import JobReport, groups_of
from millrace.rest import (
    BandView,
    FleetView,
    JobState,
    JobView,
    LedgerView,
    MetricView,
    SampleView,
    SeriesView,
    SpecView,
    StepMetrics,
)
from tests.terminal.test_watch import REPLICA


def a_job(text: str) -> JobView:
    return JobView(
        id="job-0123456789ab",
        name=text,
        state=JobState.FAILED,
        step=3,
        steps=60,
        version=3,
        reward=0.5,
        created_s=0.0,
        failure=text,
        spec={"name": text, "output": "/out", "model": {"path": "/model"}, text: {text: [text]}},
    )


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


def events_of(text: str) -> list[Event]:
    saved = CheckpointSaved(step=2, path=text, bytes=None, seconds=None)
    return [Event(id="1-0", time_s=0.0, message=text, data=data) for data in (TrackerFailed(tracker=text), saved)]


def contents(text: str, values: Sequence[float], samples: Sequence[SampleView]) -> JobReport:
    """A job whose metric `text` has one value in each step."""
    steps = len(values)
    curve = BandView(mean=list(values), least=[], greatest=[])
    job = a_job(text)
    return JobReport(
        time_s=0.0,
        job=job,
        last=StepMetrics(step=steps, time_s=0.0, values={text: values[-1]}) if values else None,
        keys=[MetricView(key=text, section=text, unit=text, meaning=text)] if values else [],
        series=SeriesView(
            steps=list(range(1, steps + 1)),
            time_s=[float(step) for step in range(steps)],
            tokens=[8.0] * steps,
            metrics={text: curve} if values else {},
        ),
        histograms=[],
        diagnosis=None,
        groups=groups_of(samples),
        ledger=LedgerView(
            issued=10, queued=1, leased=2, generated=3, trained=1, dropped=3, reasons={DropReason.NO_SIGNAL: 3}
        ),
        publications=[a_publication(text)],
        events=events_of(text),
        spec=SpecView(spec=job.spec, given=job.spec),
        fleet=FleetView(epoch=1, trainers=[], replicas=[REPLICA.model_copy(update={"id": text, "device": text})]),
    )


HOSTILE = '<script>alert(1)</script></pre></style><img src=x onerror="alert(2)">"\'&amp;]]><!-- \x00\x1b\u202e\u2028 x'


def hostile_contents() -> JobReport:
    """HOSTILE in the name, the metric, the samples, events, members and the spec."""
    from tests.test_trackers import a_sample

    turn = {"given": "g", "given_tokens": 1, "sampled_tokens": 1, "reward": 0.0, "stop_reason": "", "versions": []}
    texts = ("prompt", "answer", "reward_failure", "member", "prompt_id", "stop_reason", "purpose")
    told = dict.fromkeys(texts, HOSTILE)
    samples = [
        a_sample(1).model_copy(update={**told, "ground_truth": HOSTILE}),
        a_sample(2).model_copy(update={**told, "ground_truth": {HOSTILE: HOSTILE}}),
        SampleView.model_validate(a_sample(3).model_dump() | {"turns": [{**turn, "answer": "<b>"}]}),
    ]
    return contents(HOSTILE, [0.5], samples)

"""A trainer behind a slow link: `diagnose` names the publication."""

from pathlib import Path

import pytest

from benchmarks.chaos.job import job
from millrace.client import Client
from millrace.rest.diagnosis import Bottleneck, DiagnosisView
from millrace.rest.timeline import IdleCause
from millrace.telemetry.spans.kinds import LaneKind
from tests.hosts.network import Network
from tests.hosts.services import HEAD, Services

pytestmark = [pytest.mark.slow, pytest.mark.matrix]  # tests/e2e/test_diagnosis.py covers the way to the answer
FIRST, LAST = 3, 5
MBIT_PER_S = 1.0


def test_the_publication_is_named(tmp_path: Path) -> None:
    spec = job(tmp_path, max_staleness=1)
    spec["schedule"] |= {"save_every_steps": 0, "steps": LAST}
    with Network([HEAD, "left", "far"]) as network, Services(network, tmp_path, forked=True) as services:
        services.coordinator()
        services.ranks(["left"])
        services.replica("far", "transformers")
        job_id = services.at_the_desk(lambda client: client.submit(spec)).id
        services.until("a step", lambda client: client.job(job_id).step >= FIRST - 2, 120.0)
        network.throttle("left", MBIT_PER_S)

        def diagnosis(client: Client) -> DiagnosisView | None:
            reached = client.job(job_id).step >= LAST
            found = client.diagnosis(job_id, FIRST, LAST)
            return found if reached and found.from_spans and IdleCause.PUBLICATION in found.loop_s else None

        found = services.until("the last step", diagnosis, 240.0)
        timeline = services.at_the_desk(lambda client: client.timeline(job_id, FIRST, LAST))
    assert found.bottleneck is Bottleneck.PUBLICATION, found.model_dump_json()
    assert found.findings[0].changes[0].setting == "publication.path"
    (trainer,) = [lane for lane in timeline.lanes if lane.kind is LaneKind.TRAINER]
    assert max(span.end_s - span.start_s for span in trainer.spans if span.kind == "transfer") > 0.2

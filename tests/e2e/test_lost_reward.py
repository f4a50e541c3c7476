"""A reward function whose file goes away while a job runs, and whose processes end: no process can load it again."""

import contextlib
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.chaos.faults import Target
from benchmarks.chaos.processes import find
from millrace.client import Client
from millrace.local.stack import Stack
from millrace.rest import JobState
from tests.e2e.conftest import finished, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
LATEST_S = 120.0


def test_the_job_names_the_file_and_goes_on_once_it_is_back(
    job: dict[str, Any], with_transformers: Stack, client: Client, tmp_path: Path
) -> None:
    job["rollout"] |= {"max_response_tokens": 24}
    job["schedule"] |= {"steps": 100_000, "prompts_per_step": 2}
    reward, job_id = tmp_path / "vowels.py", client.submit(job).id
    until("a step", lambda: client.job(job_id).step, LATEST_S)
    reward.rename(tmp_path / "moved.py")
    for process in find(with_transformers, Target.SCORER):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends with another one
            process.kill()

    def failed() -> list[str]:
        return [event.message for event in client.events(job_id, follow=False) if event.kind == "member.failed"]

    assert f"there is no file {reward}" in until("the replica says why", failed, LATEST_S)[0]
    assert client.job(job_id).state == JobState.RUNNING
    (tmp_path / "moved.py").rename(reward)
    client.cancel(job_id)
    steps = until(
        "its end", lambda: client.job(job_id).state == JobState.CANCELLED and client.job(job_id), LATEST_S
    ).step
    client.resume(job_id, {"reward": {"timeout_s": 9.0}, "schedule": {"steps": steps + 2}})
    view = finished(client, job_id)
    ledger = client.ledger(job_id)
    assert view.step == steps + 2 and ledger.trained == 2 * view.step
    assert ledger.issued == ledger.trained + ledger.dropped

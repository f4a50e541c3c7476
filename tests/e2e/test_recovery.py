"""The coordinator is killed in the middle of a job."""

import os
import signal

import pytest

from millrace.errors import MillraceError
from tests.e2e.conftest import adds_up, finished, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_the_job_goes_on_after_the_coordinator_was_killed(start, job):
    job["schedule"]["steps"] = 8
    stack = start(replicas=1, engine="vllm")
    client = stack.client()
    view = client.submit(job, key="once")
    until("two steps", lambda: client.job(view.id).step >= 2, 240)

    killed = stack.pids()["coordinator"]
    os.kill(killed, signal.SIGKILL)
    until("it is started again", lambda: stack.pids().get("coordinator") not in (None, killed), 30)

    def answers():
        try:
            return client.ready()
        except MillraceError:
            return False

    until("it answers", answers, 60)
    assert client.submit(job, key="once").id == view.id, "the idempotency key survived"
    done = finished(client, view.id)
    adds_up(client, done)
    assert done.version == done.steps, "one version a step: nothing was trained twice"

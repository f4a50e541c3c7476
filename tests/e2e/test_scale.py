"""A running job with more and fewer replicas, by `millrace scale` and by autoscaling: none loses any work."""

import pytest

from millrace.local.state_folder import scale
from millrace.rest import JobState, MemberState
from tests.e2e.conftest import until
from tests.e2e.test_elastic import makers

# tests/local/test_supervisor.py has the same without an engine.
pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(600)]


def test_a_replica_comes_works_and_drains(start, job):
    job["schedule"] |= {"steps": 100_000, "max_staleness": 2}
    stack = start(replicas=1, engine="transformers")
    client = stack.client()
    view = client.submit(job)
    until("a step", lambda: client.job(view.id).step >= 1, 120)
    (first,) = client.fleet().replicas
    assert scale(stack.options.folder, 2) == ["rollout-1"]
    until("both replicas work", lambda: len({member for _, member in makers(client, view.id)}) == 2, 120)
    (second,) = (member.id for member in client.fleet().replicas if member.id != first.id)

    assert scale(stack.options.folder, 1) == ["rollout-1"]
    until("the second one has left", lambda: set(stack.pids()) == {"coordinator", "trainer", "rollout-0"}, 60)
    states = {member.id: member.state for member in client.fleet().replicas}
    assert states.get(second, MemberState.LEFT) is MemberState.LEFT, "its leases were finished and not lost"
    step = client.job(view.id).step
    until("steps", lambda: client.job(view.id).step >= step + 3, 60)
    ledger = client.ledger(view.id)
    assert ledger.dropped == 0
    assert ledger.issued == ledger.queued + ledger.leased + ledger.generated + ledger.trained
    client.cancel(view.id)


def test_the_coordinator_adds_replicas_and_gives_them_back(start, job, monkeypatch):
    """tests/services/coordinator/scaling has the decision."""
    monkeypatch.setenv("MILLRACE_SCALE_UP_S", "5")
    monkeypatch.setenv("MILLRACE_SCALE_DOWN_S", "20")
    job["schedule"] |= {"steps": 60, "max_staleness": 2}
    stack = start(replicas=1, autoscale="1:3", engine="transformers")
    client = stack.client()
    view = client.submit(job)
    until("a second replica works", lambda: len({member for _, member in makers(client, view.id)}) >= 2, 120)
    until("the job ends", lambda: client.job(view.id).state is JobState.SUCCEEDED, 120)
    until("one replica is left", lambda: set(stack.pids()) == {"coordinator", "trainer", "rollout-0"}, 120)
    scaled = [event.data for event in client.events(view.id, follow=False) if event.kind == "replicas.scaled"]
    assert scaled and all(1 <= each.wanted <= 3 for each in scaled)
    ledger = client.ledger(view.id)
    assert (ledger.issued, ledger.dropped) == (ledger.trained, 0), "no prompt was lost"

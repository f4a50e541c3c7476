"""`millrace scale` on a running job: a second replica takes work, and leaves without losing any."""

import pytest

from millrace.local.scale import scale
from millrace.rest import MemberState
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

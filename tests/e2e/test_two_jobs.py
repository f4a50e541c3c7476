"""Two jobs on one stack: at once, each in a partition with a trainer and a replica of its own, and one is cancelled; or
in turn, as one interrupts the other.

tests/services/coordinator/test_partitions.py and tests/services/coordinator/jobs/test_preemption.py have the same with
simulated members, and what goes wrong."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millrace.drops import DropReason
from millrace.events import EventKind
from millrace.local import child_processes
from millrace.local.stack import Stack
from millrace.rest import JobState
from tests.e2e.conftest import adds_up, finished, started, until

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(600)]


@pytest.fixture
def another_trainer(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """another_trainer(stack, *options) starts a trainer of one rank beside a stack."""
    with contextlib.ExitStack() as running:

        def start(stack: Stack, *options: str) -> None:
            log = running.enter_context((tmp_path / "another-trainer.log").open("ab"))
            argv = (sys.executable, "-m", "services.trainer.launch", "--ranks", "1", "--coordinator", stack.coordinator)
            environment = {**stack.options.environment, "MILLRACE_HOST": "127.0.0.1"}
            trainer = child_processes.start((*argv, *options), environment, log)
            running.callback(trainer.wait, 60)
            running.callback(trainer.terminate)

        yield start


def test_two_jobs_train_at_once_and_a_cancelled_one_leaves_the_other_alone(
    start, job, another_trainer, another_replica
):
    stack = start(replicas=1, engine="transformers")
    client = stack.client()
    another_trainer(stack, "--partition", "b")
    another_replica(stack, "transformers", "--partition", "b")

    def submit(partition: str, steps: int) -> str:
        schedule = {**job["schedule"], "steps": steps, "partition": partition}
        return client.submit({**job, "output": f"{job['output']}-{partition}", "schedule": schedule}).id

    first, second = submit("default", 100_000), submit("b", 100)
    until("a step of both", lambda: min(client.job(each).step for each in (first, second)) >= 1, 240)
    assert [client.job(each).state for each in (first, second)] == [JobState.RUNNING] * 2
    fleet = client.fleet()
    assert sorted(member.partition for member in fleet.trainers) == ["b", "default"]
    of_b = {member.id for member in fleet.replicas if member.partition == "b"}
    assert len(of_b) == 1 and len(fleet.replicas) == 2
    client.cancel(first)
    until("the first one ends", lambda: client.job(first).state is JobState.CANCELLED, 60)
    step = client.job(second).step
    view = finished(client, second)
    assert step < view.step == 100 and view.partition == "b"
    adds_up(client, view)
    assert client.ledger(second).dropped == 0
    assert {event.data.member for event in client.events(second, follow=False) if event.kind == "member.joined"} == of_b


def test_a_job_gives_way_to_an_urgent_one_and_goes_on_from_its_checkpoint(tmp_path, job, monkeypatch):
    monkeypatch.setenv("MILLRACE_PREEMPT_AFTER_S", "1")
    with started(tmp_path / "state", replicas=1, engine="transformers") as stack, stack.client() as client:
        low = client.submit({**job, "schedule": {**job["schedule"], "steps": 12}}).id
        until("a step of the first one", lambda: client.job(low).step >= 1, 240)
        urgent = {**job["schedule"], "steps": 2, "priority": 5, "preempt": True}
        high = client.submit({**job, "output": f"{job['output']}-high", "schedule": urgent}).id
        adds_up(client, finished(client, high))
        view = finished(client, low)
        adds_up(client, view)
        ledger, events = client.ledger(low), list(client.events(low, follow=False))
        assert set(ledger.reasons) <= {DropReason.JOB_PREEMPTED}
        steps = [event.data.step for event in events if event.kind == EventKind.STEP_DONE]
        assert steps == list(range(1, 13)), "nothing is trained twice"
        (gave_way,) = (n for n, event in enumerate(events) if "gives way to" in event.message)
        (saved,) = (event for event in events[:gave_way] if event.kind == EventKind.CHECKPOINT_SAVED)
        assert saved.data.step == sum(event.kind == EventKind.STEP_DONE for event in events[:gave_way]) < 12
        after = {event.kind: event for event in events[gave_way:]}
        assert after[EventKind.TRAINER_CONFIGURED].data.version == saved.data.step, "it loaded that checkpoint"
        assert after[EventKind.MEMBER_CONFIGURED].data.kept_engine


def test_two_running_jobs_share_replicas(tmp_path, job, another_trainer, monkeypatch):
    monkeypatch.setenv("MILLRACE_SHARE_REPLICAS_S", "2")
    with started(tmp_path / "state", replicas=2, engine="transformers") as stack, stack.client() as client:
        another_trainer(stack, "--partition", "b")
        until("both trainers", lambda: len(client.fleet().trainers) == 2, 120)

        def submit(name: str, steps: int) -> str:
            return client.submit(
                {**job, "output": f"{job['output']}-{name}", "schedule": {**job["schedule"], "steps": steps}}
            ).id

        def spread(**wanted: int) -> None:
            def holds() -> bool:
                found = [member.partition for member in client.fleet().replicas if member.state == "serving"]
                return sorted(found) == sorted(place for place, count in wanted.items() for _ in range(count))

            until(f"replicas of {wanted}", holds, 240)

        first = submit("first", 100_000)
        spread(default=2)
        until("a step of the first one", lambda: client.job(first).step >= 1, 240)
        second = submit("second", 60)
        spread(default=1, b=1)
        until("a step of the second one", lambda: client.job(second).step >= 1, 240)
        step = client.job(first).step
        until("the first one goes on", lambda: client.job(first).step >= step + 2, 240)
        client.cancel(first)
        spread(b=2)
        view = finished(client, second)
        adds_up(client, view)
        ledger, events = client.ledger(second), list(client.events(second, follow=False))
        assert ledger.dropped == 0 and EventKind.LEASE_EXPIRED not in {event.kind for event in events}
        configured = [event.data for event in events if event.kind == EventKind.MEMBER_CONFIGURED]
        assert len(configured) == 2 and all(each.kept_engine for each in configured)
        ledger, events = client.ledger(first), list(client.events(first, follow=False))
        assert set(ledger.reasons) <= {DropReason.JOB_CANCELLED} and ledger.issued == ledger.trained + ledger.dropped
        assert not {event.kind for event in events} & {EventKind.LEASE_EXPIRED, EventKind.PUBLICATION_FAILED}

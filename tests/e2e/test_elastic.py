"""Replicas with two engines share the work, join while a job runs, and die while they generate, with all their
processes."""

import psutil
import pytest

from tests.e2e.conftest import adds_up, finished, until

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(600)]
"""`make test` has replicas that die and others that join from a sibling in test_publication_faults.py, the end of all
processes of vLLM in tests/services/rollout/test_launch.py, those that it spawns in
tests/services/rollout/engines/test_vllm_processes.py, and figures by engine in
tests/services/trainer/step/test_metrics.py."""


def makers(client, job_id):
    """Which members made the groups kept as samples, by step."""
    samples = client.samples(job_id, limit=1000)
    return {(s.step, s.member) for s in samples}


def reports(client, job_id, member):
    """Of the publications and copies that reached a member."""
    done = [e.data for e in client.events(job_id, follow=False) if e.kind == "publication.done"]
    return [report for report in done if any(m.member == member for m in report.members[1:])]


def test_replicas_share_join_and_die(start, another_replica, job):
    job["schedule"] |= {"steps": 16, "max_staleness": 4}
    job["rollout"]["samples_per_prompt"] = 2
    job["trainer"]["optimizer"]["lr"] = 1e-5  # what the engines differ by is not to drown in what the versions do
    stack = start(replicas=2, engine="transformers")
    client = stack.client()
    view = client.submit(job)
    until("both replicas work", lambda: len({member for _, member in makers(client, view.id)}) == 2, 300)
    first_two = {member for _, member in makers(client, view.id)}

    client.pause(view.id)  # an engine takes longer to start than these steps; who joins meanwhile gets its weights
    late = another_replica(stack, "vllm")
    joined = until(
        "the third replica serves",
        lambda: next((r for r in client.fleet().replicas if r.id not in first_two and r.state == "serving"), None),
        300,
    )
    assert joined.version >= 1, "it got the current weights, not those of the model folder"
    (report,) = until("its weights' way is told", lambda: reports(client, view.id, joined.id), 60)
    assert report.source == "sibling" and report.members[0].member in first_two, "not from the trainer"

    client.resume(view.id)
    until("the third replica's work is trained", lambda: joined.id in {m for _, m in makers(client, view.id)}, 120)
    until("it generates", lambda: any(r.running for r in client.fleet().replicas if r.id == joined.id), 60)
    below = psutil.Process(late.pid).children(recursive=True)
    names = " ".join(" ".join(process.cmdline()) for process in below)
    assert "EngineCore" in names and "Worker" in names
    late.kill()
    late.wait()
    _, alive = psutil.wait_procs(below, timeout=60)
    assert not [process.cmdline() for process in alive if process.status() != psutil.STATUS_ZOMBIE]

    done = finished(client, view.id, 300)
    adds_up(client, done)
    assert client.ledger(view.id).dropped == 0, "no prompt was lost with the replica"
    by_joined = [s for s in client.samples(view.id, limit=1000) if s.member == joined.id]
    assert min(v for s in by_joined for v in s.versions) >= 1, "nothing was generated before its weights came"
    mixed = [row.values for row in client.metrics(view.id) if "rollout_corr/k3_kl/vllm" in row.values]
    assert mixed, "the two engines' probabilities are told apart"
    for values in mixed:
        assert max(values[f"rollout_corr/k3_kl/{engine}"] for engine in ("vllm", "transformers")) < 1e-3

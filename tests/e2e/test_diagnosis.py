"""Planted bottlenecks in jobs of real services: `diagnose` names each, and the timeline shows it.

What is planted takes several seconds of a step, so that it outweighs everything else on a slow machine too."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.client import Client
from millrace.local.stack import Stack
from millrace.rest import MemberState
from millrace.rest.diagnosis import Bottleneck, DiagnosisView
from millrace.rest.timeline import IdleCause
from millrace.telemetry.spans.kinds import LaneKind, SpanKind
from tests.e2e.conftest import finished, until

pytestmark = pytest.mark.matrix
"""test_timeline.py covers the way from the spans to the answer, tests/services/coordinator/diagnosis/test_findings.py
what is found in them."""
STEPS = 3


def diagnosed(client: Client, job: dict[str, Any], cause: IdleCause, first: int = 2) -> DiagnosisView:
    """The diagnosis of the job's later steps. The timeline has idle time of the trainer with that cause."""
    job_id = finished(client, client.submit(job).id).id

    until("the spans of the last step", lambda: _is_told(client, job_id, STEPS), 60.0)
    found = client.diagnosis(job_id, first, STEPS)
    assert found.from_spans
    assert sum(found.loop_s.values()) == pytest.approx(found.step_s, rel=0.01)
    timeline = client.timeline(job_id, first, STEPS)
    (trainer,) = [lane for lane in timeline.lanes if lane.kind is LaneKind.TRAINER]
    assert trainer.idle_s.get(cause, 0.0) > 0 or cause is IdleCause.TRAINER
    return found


def _is_told(client: Client, job_id: str, step: int) -> bool:
    """Whether the spans of a step have come."""
    spans = {lane.kind: lane.spans for lane in client.timeline(job_id, step, step).lanes}
    told = [(LaneKind.COORDINATOR, SpanKind.STEP), (LaneKind.TRAINER, SpanKind.REPORT)]
    return all(any(s.kind is kind and s.step == step for s in spans.get(lane, [])) for lane, kind in told)


def short(job: dict[str, Any]) -> dict[str, Any]:
    job["schedule"] |= {"steps": STEPS}
    job["rollout"] |= {"max_response_tokens": 8}
    return job


@contextlib.contextmanager
def slowed(pid: int, stopped_s: float) -> Iterator[None]:
    """The process and those below it run for 10 ms, then stand still for `stopped_s`, over and over."""
    pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    ended = threading.Event()

    def alternate() -> None:
        stopped = False
        while not ended.wait(stopped_s if stopped else 0.01) or stopped:
            stopped = not stopped
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP if stopped else signal.SIGCONT)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_slow_reward(client: Client, job: dict[str, Any], tmp_path: Path) -> None:
    reward = "import time\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    (tmp_path / "slow.py").write_text(f"{reward}    time.sleep(2.0)\n    return float(len(solution_str) % 2)\n")
    job = short(job)
    job["schedule"]["prompts_per_step"] = job["rollout"]["samples_per_prompt"] = 2
    job["reward"] = {"function": f"{tmp_path / 'slow.py'}:compute_score", "workers": 1}
    found = diagnosed(client, job, IdleCause.REWARDS)
    assert found.bottleneck is Bottleneck.REWARDS, found.model_dump_json()
    assert found.findings[0].changes[0].setting == "reward.workers"
    told = subprocess.run(
        [sys.executable, "-m", "millrace", "diagnose", found.job_id, "--url", client.url],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "rewards, at most" in told.stdout and "reward.workers: raise it" in told.stdout


def test_a_trainer_that_is_too_slow(client: Client, job: dict[str, Any], tmp_path: Path) -> None:
    loss = "import time\nfrom torch import Tensor\ndef slow(*, logprobs_bt: Tensor, advantages_bt: Tensor):\n"
    (tmp_path / "slow.py").write_text(f"{loss}    time.sleep(4.0)\n    return -logprobs_bt * advantages_bt, {{}}\n")
    job = short(job)
    job["schedule"]["prompts_per_step"] = job["rollout"]["samples_per_prompt"] = 2
    job["algorithm"] = {"policy_loss": {"name": f"{tmp_path / 'slow.py'}:slow"}}
    found = diagnosed(client, job, IdleCause.TRAINER)
    assert found.bottleneck is Bottleneck.TRAINER, found.model_dump_json()


def test_no_staleness_and_a_long_tail(client: Client, job: dict[str, Any], with_transformers: Stack) -> None:
    """An answer ends at one of some letters: most are short, and a few long. The replica is slow."""
    job["schedule"] |= {"steps": STEPS, "max_staleness": 0}
    job["rollout"] |= {"max_response_tokens": 380, "stop": list("aeiostn")}
    job["rollout"]["engine_options"]["max_num_seqs"] = 64
    with slowed(with_transformers.pids()["rollout-0"], stopped_s=0.08):
        found = diagnosed(client, job, IdleCause.LONG_TAIL)
    assert found.bottleneck is Bottleneck.STALENESS_BOUND, found.model_dump_json()
    assert found.findings[0].changes[0].setting == "schedule.max_staleness"


def test_one_slow_replica(
    start: Callable[..., Stack],
    another_replica: Callable[[Stack, str], subprocess.Popen[bytes]],
    job: dict[str, Any],
) -> None:
    stack = start(replicas=1, engine="transformers")
    slow = another_replica(stack, "transformers")
    with stack.client() as client:
        job["schedule"] |= {"steps": 500, "max_staleness": 0}
        job["rollout"] |= {"max_response_tokens": 48}
        job_id = client.submit(job).id

        def both_serve() -> bool:
            replicas = client.fleet().replicas
            return len(replicas) == 2 and all(member.state is MemberState.SERVING for member in replicas)

        until("two replicas that serve", both_serve, 120.0)
        known = {client.fleet().replicas[0].id, client.fleet().replicas[1].id}
        with slowed(slow.pid, stopped_s=0.2):
            first = client.job(job_id).step + 2
            until("two slow steps", lambda: client.job(job_id).step > first + 1, 120.0)
        until("the spans of these steps", lambda: _is_told(client, job_id, first + 1), 60.0)
        found = client.diagnosis(job_id, first, first + 1)
        client.cancel(job_id)
    assert found.bottleneck is Bottleneck.LONG_TAIL, found.model_dump_json()
    assert found.findings[0].member in known

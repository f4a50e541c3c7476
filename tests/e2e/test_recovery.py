"""The coordinator is killed in the middle of a job: a model with attention on latents and experts, Megatron, vLLM; and
the one that leads of two.

`make test` kills the coordinator of a job in test_chaos.py, the leader of a stack of two in
tests/services/coordinator/test_high_availability.py, and has such a model with Megatron and vLLM in
tests/services/trainer/backends/megatron/test_vllm.py.
"""

import os
import signal
import time

import pytest

from millrace.errors import MillraceError
from tests.e2e.conftest import adds_up, finished, until
from tests.models import byte_tokenizer
from tests.ports import held_port
from tests.services.trainer.backends.megatron import tiny

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(600)]

ALL_EXPERTS = {"num_experts_per_tok": 8, "topk_group": 4}
"""Every token goes to all experts. Where a router chooses, two float32 kernels send about one of a million tokens to
other experts, at a near tie, and its log-probabilities are 0.03 to 0.4 apart."""


def test_the_job_goes_on_after_the_coordinator_was_killed(start, job, tmp_path):
    folder = tmp_path / "model"
    tiny.save("deepseek_v3", folder, served=True, **ALL_EXPERTS)
    byte_tokenizer().save_pretrained(folder)
    job["model"]["path"] = str(folder)
    job["trainer"]["backend"] = "megatron"
    job["publication"] = {"path": "sharded"}
    job["rollout"]["max_response_tokens"] = 32
    job["schedule"] |= {"steps": 6, "prompts_per_step": 4, "max_staleness": 0}
    stack = start(replicas=1, engine="vllm")
    client = stack.client()
    view = client.submit(job, key="once")
    until("two steps", lambda: client.job(view.id).step >= 2, 240)

    killed = stack.pids()["coordinator"]
    os.kill(killed, signal.SIGKILL)
    since = time.time()
    until("it is started again", lambda: stack.pids().get("coordinator") not in (None, killed), 60)

    def answers():
        try:
            return client.ready()
        except MillraceError:
            return False

    until("it answers", answers, 60)
    assert client.submit(job, key="once").id == view.id, "the idempotency key survived"
    done = finished(client, view.id)
    adds_up(client, done, groups_per_step=4)
    assert done.version == done.steps, "one version a step: nothing was trained twice"
    for row in client.metrics(view.id)[1:]:
        assert row.values["training/rollout_logprobs_diff_max"] < 1e-3, "every token is of the version that it names"
    published = [e for e in client.events(view.id, follow=False) if e.kind == "publication.done"]
    assert published[-1].time_s > since, "it was killed before the last step"
    assert {member.loader_tensors for event in published for member in event.data.members[1:]} == {0}


def test_the_job_goes_on_with_another_coordinator_of_the_stack(start, job):
    with held_port() as http, held_port() as grpc:
        stack = start(replicas=1, engine="transformers", standby_coordinators=[[http, grpc]])
        client = stack.client(patience_s=60)
        view = client.submit(job)
        until("two steps", lambda: client.job(view.id).step >= 2, 240)
        killed = stack.pids()["coordinator"]
        os.kill(killed, signal.SIGKILL)
        done = finished(client, view.id)
        assert client.url.endswith(f":{http}"), "the other one leads"
        adds_up(client, done)
        assert done.version == done.steps, "nothing was trained twice"
        until("it is started again", lambda: stack.pids().get("coordinator") not in (None, killed), 60)

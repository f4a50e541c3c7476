"""Mutual TLS between all services of a job, one of which is killed in the middle of it."""

import os
import signal

import grpc
import httpx
import pytest

from millrace.client import Client
from millrace.errors import Untrusted
from millrace.wire.channel import OPTIONS
from millrace.wire.tls.faults import TlsFault
from tests.certificates import Authority
from tests.e2e.conftest import adds_up, finished, until

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(600)]


def test_a_job_by_mutual_tls_survives_a_killed_replica(start, job, tmp_path, monkeypatch):
    fleet = Authority(tmp_path / "tls")
    for name, value in fleet.member("member").variables().items():
        monkeypatch.setenv(name, value)
    job["schedule"] |= {"steps": 8, "max_staleness": 1}
    stack = start(replicas=2, engine="transformers")
    client = stack.client()
    assert client.url.startswith("https://")
    view = client.submit(job)
    until("two steps", lambda: client.job(view.id).step >= 2, 300)

    member = next(each for each in client.fleet().replicas if each.state == "serving")
    with grpc.insecure_channel(member.address, options=OPTIONS) as plain, pytest.raises(grpc.FutureTimeoutError):
        grpc.channel_ready_future(plain).result(2)
    metrics = httpx.get(f"https://{member.metrics_address}/metrics", verify=fleet.context(), trust_env=False)
    assert "millrace_member_info" in metrics.text

    victim = next(pid for name, pid in stack.pids().items() if name.startswith("rollout"))
    os.kill(victim, signal.SIGKILL)
    done = finished(client, view.id, 300)
    adds_up(client, done)
    assert client.ledger(view.id).dropped == 0, "no prompt was lost with the replica"
    assert done.version == done.steps

    for name in fleet.member("member").variables():
        monkeypatch.delenv(name)
    with Client(client.url.replace("https", "http"), patience_s=0.2) as outside, pytest.raises(Untrusted) as told:
        outside.fleet()
    assert told.value.fault == TlsFault.PLAINTEXT

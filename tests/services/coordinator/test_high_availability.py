"""Two coordinators on one Redis: the leader is killed or stopped in each phase of a step, the other one goes on."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from millrace.client import Client
from millrace.contracts.methods import FleetRpc
from millrace.contracts.v1 import fleet_pb2
from millrace.errors import Unavailable
from millrace.local.options import StackOptions
from millrace.rest import JobState
from millrace.wire.channel import Peer
from millrace.wire.probe import serving
from services.coordinator.store import Store
from tests.ports import held_port
from tests.services.coordinator.cluster import Cluster, until
from tests.services.coordinator.pair import Pair, pair
from tests.services.coordinator.redis import a_job, lead
from tests.services.coordinator.test_recovery import trained_once

pytestmark = pytest.mark.slow

PHASES = ("waiting", "generating", "stepping", "publishing", "checkpoint")
"""Phases of a step, in each of which the leader is lost."""
MOMENTS = {"stepping": "Step", "publishing": "TransferPublication", "checkpoint": "Save"}
"""Call of the trainer during which it happens."""
LATEST_S = 60.0
"""Until the other one leads, on a machine that has much else to do. The lease lasts 3 s."""


async def lost_in(phase: str, how: signal.Signals, both: Pair, spec: dict[str, Any]) -> float:
    """A job whose leader is lost in this phase, from its submission to its end. Answers the seconds until the other
    coordinator led."""
    cluster = Cluster(both)  # type: ignore[arg-type]  # what it uses of a coordinator both have together
    spec["schedule"]["save_every_steps"] = 2
    struck = asyncio.Event()
    since = 0.0

    async def strike(request: Any = None) -> None:
        nonlocal since
        if not struck.is_set() and (phase == "waiting" or trainer.version >= 2):
            since = time.monotonic()
            both.strike(how)
            struck.set()

    try:
        trainer = await cluster.trainer(step_s=0.02)
        if phase == "waiting":
            job_id = await cluster.submit(spec)
            await until(lambda: cluster.events(job_id, "trainer.configured"), within_s=120)
            await strike()
        else:
            replica = await cluster.replica(seconds=0.05)
            struck_in = trainer.faults if phase in MOMENTS else replica.faults
            struck_in[MOMENTS.get(phase, "Generate")] = strike
            job_id = await cluster.submit(spec)
            async with asyncio.timeout(120):
                await struck.wait()
        seconds = await both.changed(since)
        if phase == "waiting":
            await cluster.replica(seconds=0.05)
        if how is signal.SIGSTOP:
            await cluster.reached(job_id, 4, 120)  # the new leader is at work when the old one wakes up
            both.other.process.send_signal(signal.SIGCONT)
            await until(lambda: asyncio.to_thread(lambda: "leads no more" in both.other.log()), within_s=120)
            await until(lambda: asyncio.to_thread(both.other.says, "/healthz"), within_s=120)
        job = await cluster.ended(job_id, 120)
        assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
        assert set(trainer.every.values()) == {1}, "nothing was trained twice"
        await trained_once(cluster, job_id, trainer)
        assert not await asyncio.to_thread(both.other.says, "/readyz")
        return seconds
    finally:
        await cluster.close()


@pytest.mark.parametrize(
    "phase,how",
    [
        ("stepping", signal.SIGSTOP),
        *(
            pytest.param(phase, how, marks=pytest.mark.matrix)  # of which the case above is one
            for phase in PHASES
            for how in (signal.SIGKILL, signal.SIGSTOP)
            if (phase, how) != ("stepping", signal.SIGSTOP)
        ),
    ],
)
def test_the_leader_is_lost(
    phase: str, how: signal.Signals, empty_redis_url: str, tmp_path: Path, spec: dict[str, Any]
) -> None:
    with pair(tmp_path, empty_redis_url) as both:
        seconds = asyncio.run(lost_in(phase, how, both, spec))
        print(f"{how.name} while {phase}: the other leads after {seconds:.2f} s")
        assert seconds < LATEST_S


def test_one_that_stands_by_says_who_leads_and_an_orderly_end_hands_over(
    empty_redis_url: str, tmp_path: Path, spec: dict[str, Any]
) -> None:
    async def call(address: str) -> None:
        peer = Peer(address)
        try:
            await peer.call(FleetRpc.Heartbeat, fleet_pb2.HeartbeatRequest(member_id="nobody"))
        finally:
            await peer.close()

    # A lease this long does not run out during the test: it is released.
    with pair(tmp_path, empty_redis_url, "--lease-s", "60") as both:
        led = both.leader.client.url
        job = both.client.submit(spec)
        url = both.other.client.url
        assert httpx.get(f"{url}/healthz").status_code == 200
        ready = httpx.get(f"{url}/readyz")
        assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
        answer = httpx.post(f"{url}/v1/jobs", json=spec)
        assert answer.status_code == 503
        assert f"the leader is at {led}" in answer.json()["detail"] and "MILLRACE_URL" in answer.json()["fix"]
        page = httpx.get(f"{url}/", headers={"Accept": "text/html"})
        assert (page.status_code, page.headers["location"]) == (307, f"{led}/")
        with pytest.raises(Unavailable, match=f"the leader is at {both.leader.address}") as refused:
            asyncio.run(call(both.other.address))
        assert "MILLRACE_COORDINATOR" in refused.value.fix
        assert [serving(each.address)[0] for each in (both.leader, both.other)] == [True, False]
        assert both.leader.stop() == 0
        asyncio.run(both.changed(time.monotonic()))
        assert both.client.job(job.id).state is JobState.QUEUED


def test_a_restarted_leader_takes_its_own_lease_at_once(empty_redis_url: str, tmp_path: Path) -> None:
    with pair(tmp_path, empty_redis_url, "--lease-s", "60") as both:
        both.leader.kill()
        both.leader.start()
        assert both.leader.says("/readyz") and not both.other.says("/readyz")


def test_no_write_of_an_old_leader_changes_anything(empty_redis_url: str) -> None:
    async def played() -> None:
        old, new = Store(empty_redis_url), Store(empty_redis_url)
        try:
            await lead(old)
            await old.jobs.create(a_job(1))
            await lead(new)
            assert new.leadership.epoch > old.leadership.epoch > 0
            writes = (
                old.connection.do("SET", "millrace:x", "1"),
                old.connection.together(("SET", "millrace:x", "1"), ("GET", "millrace:x")),
                old.connection.do("RPUSH", "millrace:x", *range(9000)),
                old.jobs.create(a_job(2)),
                old.leadership.renew(),
                old.leadership.still_ours(),
            )
            for write in writes:
                with pytest.raises(Unavailable, match="another coordinator leads"):
                    await write
            assert await new.connection.do("EXISTS", "millrace:x") == 0
            assert (await new.index.page(9)).total == 1
            await old.leadership.release()
            assert (await new.leadership.holder()).place == "here"
            await new.connection.do("RPUSH", "millrace:x", *range(9000))
            assert await new.connection.do("LLEN", "millrace:x") == 9000
        finally:
            await old.close()
            await new.close()

    asyncio.run(played())


SUPERVISING = """
import sys
from millrace.local.options import StackOptions, services
from millrace.local.supervisor import supervise

options = StackOptions.from_json(sys.argv[1])
raise SystemExit(supervise(options, [each for each in services(options) if each.kind in ("redis", "coordinator")]))
"""
"""The supervisor of a stack without its trainer and replica: python -c SUPERVISING OPTIONS."""


@contextlib.contextmanager
def supervised(state: Path) -> Iterator[StackOptions]:
    """Two coordinators of a local stack, and their Redis. At the end they stop in order."""
    with contextlib.ExitStack() as held:
        ports = [held.enter_context(held_port()) for _ in range(4)]
        options = StackOptions(
            str(state), http_port=ports[0], grpc_port=ports[1], standby_coordinators=[ports[2:]], replicas=1
        )
        argv = (sys.executable, "-c", SUPERVISING, options.to_json())
        environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
        supervisor = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=environment)
        try:
            yield options
        finally:
            supervisor.terminate()
            console = supervisor.communicate(timeout=120)[1]
            print(console)
    assert (
        supervisor.returncode == 0
        and f"MILLRACE_URL={options.url} MILLRACE_COORDINATOR={options.coordinator}" in console
    )
    assert "did not stop within" not in console and "redis ended" not in console


def test_a_local_stack_of_two_goes_on_without_its_leader_which_comes_back_and_stands_by(
    tmp_path: Path, spec: dict[str, Any]
) -> None:
    """As `millrace up --coordinators 2` starts them."""
    with supervised(tmp_path / "state") as options:
        first, second = (Client(url, token="", patience_s=0) for url in options.url.split(","))
        with first, second, Client(options.url, token="", patience_s=60) as client:
            asyncio.run(killed_in_a_stack(options, client, first, second, spec))


async def killed_in_a_stack(
    options: StackOptions, client: Client, first: Client, second: Client, spec: dict[str, Any]
) -> None:
    def pid(name: str) -> int:
        return int(json.loads((options.folder / "stack.json").read_text())["processes"].get(name, 0))

    def logged(name: str, what: str) -> bool:
        log = options.folder / "logs" / f"{name}.log"
        return log.exists() and what in log.read_text()

    async def true(what: Any, *words: str) -> None:
        await until(lambda: asyncio.to_thread(what, *words), within_s=120)

    cluster: Any = Cluster(SimpleNamespace(address=options.coordinator, client=client))  # type: ignore[arg-type]
    try:
        await true(first.ready)
        await true(logged, "coordinator-1", "standing by")
        trainer, _ = await cluster.trainer(step_s=0.1), await cluster.replica(seconds=0.05)
        job_id = await cluster.submit(spec)
        await cluster.reached(job_id, 2)
        killed = pid("coordinator")
        os.kill(killed, signal.SIGKILL)
        await true(second.ready)
        job = await cluster.ended(job_id, 120)
        assert (job.state, job.failure) == (JobState.SUCCEEDED, None)
        assert set(trainer.every.values()) == {1}, "nothing was trained twice"
        await trained_once(cluster, job_id, trainer)
        await true(lambda: pid("coordinator") not in (0, killed))
        await true(logged, "coordinator", "standing by")
        assert second.ready() and not first.ready()
    finally:
        await cluster.close()

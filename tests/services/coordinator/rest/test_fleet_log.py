"""The newest lines of a member's log, asked through the coordinator."""

import asyncio
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from millrace.cli import app
from millrace.telemetry.logs import TAIL
from tests.services.coordinator.cluster import Cluster, scenario
from tests.services.coordinator.conftest import CoordinatorProcess

pytestmark = pytest.mark.slow
LINE = {"timestamp": "2026-01-02T03:04:05Z", "level": "warning", "event": "slow disk", "seconds": 2.5}


def printed(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["logs", *arguments])


@scenario
async def test_lines_of_members_and_of_the_coordinator(cluster: Cluster, spec: dict[str, Any]) -> None:
    shared = cluster.coordinator
    url = f"http://127.0.0.1:{shared.http_port}"
    TAIL._keep(None, "warning", dict(LINE))  # the simulated members live in this process
    replica = await cluster.replica()
    log = await asyncio.to_thread(shared.client.log, replica.id)
    assert log.member == replica.id
    assert ("2026-01-02T03:04:05Z", "warning", "slow disk", "seconds=2.5") in [
        (line.time, line.level, line.message, line.details) for line in log.lines
    ]
    assert len((await asyncio.to_thread(shared.client.log, replica.id, 1)).lines) == 1
    own = await asyncio.to_thread(shared.client.log, "coordinator")
    assert any(line.message == "member joined" and replica.id in line.details for line in own.lines)
    told = await asyncio.to_thread(printed, replica.id, "-n", "500", "--url", url)
    assert "2026-01-02T03:04:05Z WARNING slow disk seconds=2.5" in told.output.splitlines()
    told = await asyncio.to_thread(printed, "coordinator", "--url", url, "--state", str(shared.folder / "none"))
    assert f"member={replica.id}" in told.output and "member joined" in told.output
    following = await asyncio.to_thread(printed, replica.id, "--follow", "--url", url)
    assert following.exit_code == 1 and "--follow" in following.stderr and "Fix: " in following.stderr


@pytest.mark.parametrize(
    ("path", "status"), [("rollout-00000000/log", 404), ("coordinator/log?lines=0", 422), ("a/log?lines=201", 422)]
)
def test_what_cannot_be_asked_for(path: str, status: int, shared: CoordinatorProcess) -> None:
    answer = httpx.get(f"http://127.0.0.1:{shared.http_port}/v1/fleet/{path}", trust_env=False)
    assert answer.status_code == status and answer.json()["detail"]

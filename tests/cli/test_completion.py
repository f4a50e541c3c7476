import asyncio
import socket
from pathlib import Path

import pytest

from tests.cli.test_drain import registered
from tests.forked import run_forked
from tests.local.programs import eventually
from tests.services.coordinator.conftest import running

pytestmark = pytest.mark.slow

LONGEST_S = 25.0
"""Less than the client's usual deadline, so that a completion that waits for that one fails here."""


def completed(line: str, **environment: str) -> list[str]:
    """What bash is offered for the last word of a command line. Nothing may be written beside it."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_MILLRACE_COMPLETE": "complete_bash"}
    done = run_forked("millrace", environment={**words, **environment}, timeout_s=LONGEST_S)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.split()


def offered(line: str, **environment: str) -> list[str]:
    """What bash is offered once the coordinator answers in time, as it may not at once on a machine with much to do."""
    found: list[str] = []
    eventually(lambda: found.extend(completed(line, **environment)) or found, 60)
    return found


def test_members_of_the_fleet_are_offered(tmp_path: Path) -> None:
    with running(tmp_path / "state", "--lost-after-s", "600", environment={"MILLRACE_TOKEN": ""}) as process:
        for member in ("rollout-1a2b3c4d", "rollout-2b99999f"):
            asyncio.run(registered(process.address, member))
        url = process.client.url
        assert offered("millrace drain rollout-1", MILLRACE_URL=url, MILLRACE_TOKEN="") == ["rollout-1a2b3c4d"]


def test_services_with_a_log_are_offered(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("trainer", "rollout-0", "rollout-1"):
        (tmp_path / "logs" / f"{name}.log").touch()
    assert completed(f"millrace logs --state {tmp_path} ro") == ["rollout-0", "rollout-1"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense"])
def test_without_a_coordinator_nothing_is_offered(url: str) -> None:
    assert completed("millrace show job-", MILLRACE_URL=url) == []


def test_a_coordinator_that_does_not_answer_keeps_nobody_waiting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert completed("millrace show job-", MILLRACE_URL=url) == []

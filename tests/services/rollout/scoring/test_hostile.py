"""Reward functions that attack the replica, its host and each other, as root and as an ordinary user.

An attack gets nothing, and costs nothing but its own answer. Where the machine allows no namespaces the same attacks
reach what they are after, which shows that they work, and the pool says what is missing.
"""

import json
import os
import secrets
import subprocess
import sys
from typing import Any

import pytest

from millrace.sandbox.boundaries import Boundary

pytestmark = pytest.mark.slow
ORDINARY_USER = "65533"
FRUITLESS = (
    "environment_of_others",
    "own_environment",
    "memory_of_others",
    "sockets",
    "network_of_others",
    "traced",
    "outlived",
    "stops_and_answers",
    "signals",
    "files_read",
    "files_written",
    "shared_memory",
    "namespaces",
    "descriptors",
    "endless_output",
)
"""Attacks that come back empty-handed."""
STOPPED = {
    "forks": "raised BlockingIOError",
    "memory_of_children": "killed: memory limit 1024 MB",
    "nameless_memory": "killed: memory limit 1024 MB",
    "stops": "timeout after 25 s",
    "huge_file": "raised OSError",
}
"""Attacks that fail, with the failure."""
REACHED = ("environment_of_others", "memory_of_others", "sockets", "files_read", "files_written", "shared_memory")
"""Attacks that succeed where there is no boundary."""


def attacked(user: str, namespaces: str, *attacks: str) -> dict[str, Any]:
    """What the attacks did to a replica of that user."""
    secret = secrets.token_hex(16)
    named = dict.fromkeys(("MILLRACE_TOKEN", "HF_TOKEN", "WANDB_API_KEY"), secret)
    command = [sys.executable, "-m", "tests.services.rollout.scoring.hostile_replica", user, namespaces, *attacks]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env={**os.environ, **named})
    if "unshare: Operation not permitted" in done.stderr:
        pytest.skip("this machine allows no user namespaces")
    assert done.returncode == 0, done.stderr[-3000:]
    assert secret not in done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


ROOT = os.getuid() == 0
ORDINARY = pytest.param("ordinary user", marks=[pytest.mark.matrix] * ROOT)  # where root's attacks cover it


@pytest.fixture(scope="module", params=["root", ORDINARY])
def replica(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A replica after all attacks."""
    if request.param == "root" and not ROOT:
        pytest.skip("needs root")
    user = ORDINARY_USER if ROOT and request.param != "root" else "same"
    result = attacked(user, "yes", *FRUITLESS, *STOPPED)
    if result["missing"]:
        pytest.skip(f"this machine does not give {result['missing']}")
    return result


@pytest.mark.parametrize("attack", FRUITLESS)
def test_an_attack_gets_nothing(attack: str, replica: dict[str, Any]) -> None:
    assert (replica["scored"][attack]["failure"], replica["scored"][attack]["got"]) == (None, [])


@pytest.mark.parametrize("attack", STOPPED)
def test_an_attack_on_the_machine_fails(attack: str, replica: dict[str, Any]) -> None:
    assert replica["scored"][attack]["failure"].startswith(STOPPED[attack])


def test_attacks_cost_no_other_answer(replica: dict[str, Any]) -> None:
    assert [attack for attack, scored in replica["scored"].items() if scored["lost"]] == []
    assert len(replica["scored"]) == len(FRUITLESS) + len(STOPPED)


def test_nothing_is_left_of_attacks(replica: dict[str, Any]) -> None:
    assert replica["left"] == []
    assert replica["segments"] == [replica["marker"]], "only what the replica made"
    assert replica["files"] == ["redis.socket", "reward.py", "state", "token"]


def test_without_namespaces_attacks_succeed_and_the_pool_says_what_is_missing() -> None:
    user = ORDINARY_USER if ROOT else "same"
    result = attacked(user, "no", *REACHED, "own_environment", "outlived", "memory_of_children")
    assert {each["boundary"] for each in result["missing"]} == set(Boundary) - {Boundary.LIMITS}
    assert all(each["reason"] for each in result["missing"])
    assert [attack for attack in REACHED if not result["scored"][attack]["got"]] == []
    assert result["scored"]["own_environment"]["got"] == []
    assert result["scored"]["memory_of_children"]["failure"] == "killed: memory limit 1024 MB"
    assert result["left"] == [], "what the code started ends with the pool all the same"

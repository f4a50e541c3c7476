"""Programs of answers that attack their scorer, the machine and each other. An attack gets nothing, scores 0 and costs
nothing else: the same scoring process goes on."""

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from typing import Any

import pytest

from millrace.errors import InvalidJob
from millrace.rewards import Term
from millrace.sandbox import probe
from services.rollout.scoring.pool import ScoringPool
from services.rollout.scoring.scored import Scored
from tests.services.rollout.scoring.hostile_programs import ATTACKS, SELF_DESTRUCTIVE
from tests.services.rollout.scoring.pools import running

pytestmark = pytest.mark.slow
ENDLESS = [name for name, (_, reason) in SELF_DESTRUCTIVE.items() if reason == "it ran for"]
"""Programs that end at their limit of seconds, which is short for them and long for the others."""
TRUTH = {"inputs": ["[]", "[]"], "outputs": ["[]", "[]"]}
ORDINARY_USER = "65533"
AS_ORDINARY_USER = """
import asyncio
from tests.services.rollout.scoring import hostile_replica, test_hostile_programs
hostile_replica.become(USER)
asyncio.run(test_hostile_programs.print_scores())
"""
FORBIDDEN = """
import asyncio
from tests.services.rollout.scoring import hostile_replica, test_hostile_programs
if USER: hostile_replica.become(USER)
hostile_replica.forbid_namespaces()
asyncio.run(test_hostile_programs.print_scores())
"""


async def score(pool: ScoringPool, code: str) -> Scored:
    (scored,) = await pool.score_group("apps", [f"```python\n{code}\n```"], TRUTH, {})
    return scored


async def attacked() -> tuple[dict[str, Scored], int]:
    """The score of every program, and how often a scoring process was replaced."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        name = secrets.token_hex(8)
        abstract.bind("\0" + name)
        abstract.listen()
        with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile(dir=folder) as secret:
            secret.write(b"secret")
            private = [secret.name, folder, os.path.dirname(__file__)]
            prey = {"port": server.getsockname()[1], "abstract": name, "private": private}
            programs = {name: f"prey = {prey!r}\n{code}\nprint(got)" for name, code in ATTACKS.items()}
            programs |= {name: code for name, (code, _) in SELF_DESTRUCTIVE.items()}
            endless = {name: programs.pop(name) for name in ENDLESS}
            found, restarts = await scores_of(programs, 60.0)
            more, also = await scores_of(endless, 1.0)
            return found | more, restarts + also


async def scores_of(programs: dict[str, str], timeout_s: float) -> tuple[dict[str, Scored], int]:
    """The scores of programs that may run for so long, and how often the scoring process was replaced."""
    terms = [Term("code", {"timeout_s": timeout_s, "memory_mb": 128, "score": "all"})]
    # More than any program takes before a slow machine looks at it: the program's own limit is to end it.
    pool = ScoringPool(terms, workers=1, timeout_s=100.0, memory_mb=4096)
    await pool.start()
    try:
        return {name: await score(pool, code) for name, code in programs.items()}, pool.restarts
    finally:
        await pool.close()


@pytest.fixture(scope="module")
def outcome() -> tuple[dict[str, Scored], int]:
    if probe.missing("programs"):
        pytest.skip("this machine does not give every boundary")
    return asyncio.run(attacked())


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_gets_nothing(attack: str, outcome: tuple[dict[str, Scored], int]) -> None:
    scored = outcome[0][attack]
    assert (scored.failure, scored.details["failed"], scored.score) == (None, None, 1.0)


@pytest.mark.parametrize("program", SELF_DESTRUCTIVE)
def test_a_limit_scores_0_and_says_which(program: str, outcome: tuple[dict[str, Scored], int]) -> None:
    scored = outcome[0][program]
    assert (scored.failure, scored.score, scored.details["passed"]) == (None, 0.0, 0)
    assert scored.details["failed"].startswith(f"case 1: {SELF_DESTRUCTIVE[program][1]}")


def test_no_program_ends_the_scorer(outcome: tuple[dict[str, Scored], int]) -> None:
    assert outcome[1] == 0


async def print_scores() -> None:
    """Scores a few programs in this process's pool, and prints the scores or why there are none."""
    try:
        async with running("code", timeout_s=100.0, memory_mb=1024, options={"timeout_s": 8.0, "score": "all"}) as pool:
            codes = ["print(input())", ATTACKS["processes"] + "print(got)", SELF_DESTRUCTIVE["fork_bomb"][0]]
            print([(await score(pool, code)).score for code in codes])
    except InvalidJob as error:
        print(error)


def printed(code: str, user: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code.replace("USER", user)], capture_output=True, text=True, timeout=250
    )
    if "unshare: Operation not permitted" in done.stderr:
        pytest.skip("this machine allows no user namespaces")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.matrix  # as test_an_attack_gets_nothing, which runs as root here
@pytest.mark.skipif(os.getuid() != 0, reason="the others run as an ordinary user then")
def test_programs_of_an_ordinary_users_replica_are_as_contained(outcome: Any) -> None:
    assert printed(AS_ORDINARY_USER, ORDINARY_USER) == "[1.0, 1.0, 0.0]"


def test_a_machine_without_namespaces_refuses_the_reward_and_names_what_is_missing() -> None:
    told = printed(FORBIDDEN, ORDINARY_USER if os.getuid() == 0 else "0")
    assert told.startswith('reward.function: "code": this machine does not give ')
    assert "processes (unshare: " in told and "Fix: allow user namespaces" in told

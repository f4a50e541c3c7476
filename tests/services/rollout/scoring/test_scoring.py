"""The scoring pool against reward functions that misbehave in every way that was thought of. Real processes."""

import asyncio
import os
from pathlib import Path

import pytest

from millrace.rewards.outcome import NOT_FINITE
from services.rollout.scoring.pool import ScoringPool
from services.rollout.scoring.scored import Scored
from tests.services.rollout.scoring.pools import one_group, scoring

pytestmark = pytest.mark.slow


def test_answers_are_scored_in_their_order(obedient: str) -> None:
    scored = one_group(obedient, [f"score {n}" for n in range(20)], workers=3, options={"scale": 0.5})
    assert [s.score for s in scored] == [n / 2 for n in range(20)]
    assert all(s.failure is None and 0 <= s.seconds < 60 for s in scored)


def test_the_function_gets_what_the_row_holds(obedient: str) -> None:
    (scored,) = one_group(obedient, ["echo"])
    assert scored.details == {"got": ["data", "truth", {"index": 3}]}


def test_built_in_rewards_are_served(obedient: str) -> None:
    async def act(pool: ScoringPool) -> list[Scored]:
        return await pool.score_group("d", ["so \\boxed{1/2}", "$9^{9^{9^{9}}}$", "7"], "0.5", {})

    right, endless, wrong = scoring("math", act, timeout_s=3.0)
    assert (right.score, right.failure) == (1.0, None)
    assert (wrong.score, wrong.failure) == (0.0, None)
    assert endless.failure in ("timeout after 3 s", "killed: memory limit 2048 MB")


FAILURES = [
    ("raise no digits", "raised ValueError: no digits (obedient.py, line 11)"),
    ("quit", "raised SystemExit: 7 (obedient.py, line 12)"),
    ("nan", f"returned nan, {NOT_FINITE}"),
    ("score 1e39", f"returned 1e+39, {NOT_FINITE}"),
    ("none", "returned None, not a number"),
    ("score x", "raised ValueError: could not convert string to float: 'x' (obedient.py, line 8)"),
]


def test_a_failure_costs_its_own_answer_and_not_the_process(obedient: str) -> None:
    async def act(pool: ScoringPool) -> tuple[list[Scored], int]:
        return await pool.score_group("d", ["pid", *(a for a, _ in FAILURES), "pid"], "t", {}), pool.restarts

    (first, *failed, last), restarts = scoring(obedient, act)
    assert [(s.score, s.failure) for s in failed] == [(None, failure) for _, failure in FAILURES]
    assert first.details["pid"] == last.details["pid"]
    assert last.details["calls"] == len(FAILURES) + 2
    assert restarts == 0


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        ("vanish", "exited with status 7"),
        ("crash", "killed: SIGABRT, under a memory limit of 400 MB"),
        ("eat", "killed: memory limit 400 MB"),
        ("write", "broke the protocol"),
        ("spin", "timeout after 1 s"),
        ("hold", "timeout after 1 s"),
        ("sleep 60", "timeout after 1 s"),
    ],
)
def test_a_process_that_is_lost_costs_its_own_answer(answer: str, failure: str, obedient: str) -> None:
    async def act(pool: ScoringPool) -> tuple[list[Scored], int]:
        return await pool.score_group("d", ["score 1", answer, "score 2", "pid"], "t", {}), pool.restarts

    (before, lost, after, last), restarts = scoring(obedient, act, timeout_s=1.0, memory_mb=400)
    assert lost.score is None and lost.failure is not None and lost.failure.startswith(failure)
    assert (before.score, after.score, restarts) == (1.0, 2.0, 1)
    assert last.details["calls"] == 2, "the process that came after kept on"


def test_a_hanging_group_costs_no_other(obedient: str) -> None:
    async def act(pool: ScoringPool) -> tuple[list[Scored], list[Scored]]:
        bad = asyncio.create_task(pool.score_group("d", ["sleep 60", "score 1"], "t", {}))
        await asyncio.sleep(0.1)
        good = await pool.score_group("d", ["score 3"] * 50, "t", {})
        assert not bad.done()
        return await bad, good

    bad, good = scoring(obedient, act, workers=2, timeout_s=2.0)
    assert [s.failure for s in bad] == ["timeout after 2 s", None]
    assert {(s.score, s.failure) for s in good} == {(3.0, None)}


def test_what_the_function_prints_and_reads_is_not_the_protocol(obedient: str, capfd: pytest.CaptureFixture) -> None:
    printed, read, scored = one_group(obedient, ["print", "read", "score 4"])
    assert [printed.score, read.score, scored.score] == [0.5, 0.0, 4.0]
    out, err = capfd.readouterr()
    assert out == ""
    assert "straight to the descriptor" in err and "from a child" in err


def test_large_answers_travel_and_large_details_stay(obedient: str) -> None:
    long, big = one_group(obedient, ["score 1" + " " * 3_000_000, "big"])
    assert long.score == 1.0
    assert big.score == 1.0 and "100012 characters" in big.details["left_out"]


def test_code_is_found_if_new_files_are_the_owners_alone(obedient: str) -> None:
    """A service of a host may run with such a umask, and the code in the sandbox as another user."""
    Path(obedient.partition(":")[0]).chmod(0o600)
    before = os.umask(0o077)
    try:
        (scored,) = one_group(obedient, ["score 2"])
    finally:
        os.umask(before)
    assert (scored.score, scored.failure) == (2.0, None)


def test_secrets_of_the_system_do_not_reach_the_function(obedient: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_TOKEN", "hush")
    (scored,) = one_group(obedient, ["env"])
    assert scored.details == {"secret": None, "path": True}


def test_a_cancelled_call_leaves_a_pool_that_works(obedient: str) -> None:
    async def act(pool: ScoringPool) -> tuple[list[Scored], int]:
        call = asyncio.create_task(pool.score_group("d", ["sleep 60", "sleep 60"], "t", {}))
        await asyncio.sleep(0.2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return await pool.score_group("d", ["score 5"], "t", {}), pool.restarts

    assert scoring(obedient, act) == ([Scored(5.0, {}, pytest.approx(0, abs=1))], 1)


def test_async_functions_are_scored(tmp_path: Path) -> None:
    path = tmp_path / "later.py"
    path.write_text(
        "import asyncio\nasync def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    await asyncio.sleep(0.01)\n    return {'score': len(solution_str)}\n"
    )
    assert [s.score for s in one_group(f"{path}:score", ["a", "bb"])] == [1.0, 2.0]

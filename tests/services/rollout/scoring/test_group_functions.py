"""Functions that score all answers to a prompt in one call, in real scoring processes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from services.rollout.scoring.pool import ScoringPool
from services.rollout.scoring.scored import Scored
from tests.services.rollout.scoring.pools import scoring

pytestmark = pytest.mark.slow

RANKED = """
import os, time
calls = 0
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, *, best=1.0):
    global calls
    calls += 1
    commands = [answer.partition(" ")[0] for answer in solution_strs]
    if "raise" in commands: raise ValueError("no order")
    if "few" in commands: return [1.0]
    if "text" in commands: return "1 2 3"
    if "nan" in commands: return [float("nan") if each == "nan" else 0.0 for each in commands]
    if "vanish" in commands: os._exit(7)
    if "sleep" in commands: time.sleep(600)
    if "eat" in commands: bytearray(1 << 30)
    if "long" in commands: return [{"score": 1, "text": "x" * 10_000}] * len(commands)
    if "array" in commands:
        import numpy
        return numpy.arange(len(commands)) / 2
    longest = max(map(len, solution_strs))
    seen = [calls, len(solution_strs), sorted(set(data_sources)), sorted(set(ground_truths)), extra_infos[-1]]
    return [{"score": best * len(answer) / longest, "seen": seen} for answer in solution_strs]
"""

Score = Callable[..., list[list[Scored]]]


@pytest.fixture
def score(tmp_path: Path) -> Score:
    """Scores groups one after the other, by one pool."""
    path = tmp_path / "ranked.py"
    path.write_text(RANKED)

    def run(*groups: list[str], **settings: object) -> list[list[Scored]]:
        async def act(pool: ScoringPool) -> list[list[Scored]]:
            return [await pool.score_group("data", answers, "truth", {"index": 3}) for answers in groups]

        return scoring(f"{path}:compute_score", act, scope="group", **settings)

    return run


def test_all_answers_are_scored_in_one_call(score: Score) -> None:
    (scored,) = score(["aa", "a", "aaaa"], workers=2, options={"best": 2.0})
    assert [each.score for each in scored] == [1.0, 0.5, 2.0]
    assert all(each.details["seen"] == [1, 3, ["data"], ["truth"], {"index": 3}] for each in scored)


def test_an_empty_group_calls_nothing(score: Score) -> None:
    nothing, (one,) = score([], ["a"])
    assert nothing == [] and one.details["seen"][0] == 1


def test_an_array_is_read_and_details_are_bounded_for_the_whole_call(score: Score) -> None:
    array, long = score(["array", "", ""], ["long"] * 300)
    assert [each.score for each in array] == [0.0, 0.5, 1.0]
    assert len(long) == 300 and all("left_out" in each.details for each in long)


def test_a_failure_is_that_of_every_answer_and_not_the_process(score: Score) -> None:
    *failed, good = score(["a", "raise"], ["a", "few"], ["text"], ["a", "nan"], ["a"])
    assert [group[0].failure for group in failed[:3]] == [
        "raised ValueError: no order (ranked.py, line 8)",
        "returned 1 scores for 2 answers",
        "returned '1 2 3', not a list of scores",
    ]
    assert (failed[3][0].failure or "").startswith("returned nan")
    assert (failed[3][0].failure or "").endswith("(answer 2 of 2)")
    assert all(len({each.failure for each in group}) == 1 and group[0].score is None for group in failed)
    assert good[0].score == 1.0 and good[0].details["seen"][0] == 5


@pytest.mark.parametrize(
    ("answer", "failure"),
    [("vanish", "exited with status 7"), ("sleep", "timeout after 1 s"), ("eat", "killed: memory limit 400 MB")],
)
def test_a_process_that_is_lost_costs_its_own_group(answer: str, failure: str, score: Score) -> None:
    lost, good = score(["a", answer], ["a", "aa"], timeout_s=1.0, memory_mb=400)
    assert [(each.score, each.failure) for each in lost] == [(None, failure)] * 2
    assert [each.score for each in good] == [0.5, 1.0]

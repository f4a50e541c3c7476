"""A reward of several functions: the weighted sum, its parts and its failures."""

import asyncio
import json
from pathlib import Path

import pytest

from millrace.rewards import Term
from millrace.rewards.outcome import NOT_FINITE
from services.rollout.scoring.pool import ScoringPool
from services.rollout.scoring.scored import Scored, summed

TERMS = [Term("a", weight=2.0, name="first"), Term("b", weight=-0.5, name="second")]


def test_the_reward_is_the_weighted_sum_and_the_details_name_each_score() -> None:
    first = [Scored(1.0, {"acc": 1, "first": 9}, 0.25), Scored(0.5, {}, 0.25)]
    second = [Scored(4.0, {"acc": 0, "length": 3}, 0.5), Scored(2.0, {}, 0.5)]
    one, two = summed(TERMS, [first, second])
    assert (one.score, one.seconds, one.failure) == (2.0 * 1.0 - 0.5 * 4.0, 0.75, None)
    assert one.details == {"acc": 1, "length": 3, "first": 1.0, "second": 4.0}
    assert (two.score, two.details) == (0.0, {"first": 0.5, "second": 2.0})


def test_the_only_function_without_a_name_scores_as_it_is() -> None:
    scored = [Scored(3.0, {"acc": 1}), Scored(None, {}, 0.0, "raised ValueError: x")]
    assert summed([Term("a")], [scored]) == scored
    assert summed([Term("a", weight=2.0, name="first")], [scored[:1]])[0].score == 6.0


def test_a_failure_names_its_function_and_costs_only_its_answer() -> None:
    bad = [Scored(None, {}, 1.0, "returned nan"), Scored(1.0)]
    failed, good = summed(TERMS, [[Scored(1.0), Scored(1.0)], bad])
    assert (failed.score, failed.details, failed.failure) == (None, {}, "second returned nan")
    assert good.score == 1.5


def test_a_sum_that_is_too_large_for_float32_is_a_failure() -> None:
    (failed,) = summed(TERMS, [[Scored(9e14)], [Scored(0.0)]])
    assert failed.failure == f"the sum of the scores is {1.8e15}, {NOT_FINITE}"


@pytest.mark.slow
def test_functions_of_both_scopes_score_every_answer_in_one_pool(tmp_path: Path) -> None:
    (tmp_path / "ranked.py").write_text(
        "def shorter(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    most = max(map(len, solution_strs))\n"
        "    return [{'score': 1 - len(each) / most, 'seen': len(solution_strs)} for each in solution_strs]\n"
    )
    terms = [
        Term("exact", {"ignore_case": True}, weight=1.0, name="right"),
        Term(f"{tmp_path}/ranked.py:shorter", scope="group", weight=0.1, name="short"),
    ]

    async def score() -> list[Scored]:
        pool = ScoringPool(terms, workers=2, timeout_s=30.0)
        await pool.start()
        try:
            return await pool.score_group("d", ["Yes", "no, not so", "yes!!"], "yes", {})
        finally:
            await pool.close()

    scored = asyncio.run(score())
    assert [each.details["right"] for each in scored] == [1.0, 0.0, 0.0]
    assert [each.details["short"] for each in scored] == [0.7, 0.0, 0.5]
    assert [each.score for each in scored] == [1.0 + 0.1 * 0.7, 0.0, 0.1 * 0.5]
    assert all(each.details["seen"] == 3 and json.dumps(each.details) for each in scored)

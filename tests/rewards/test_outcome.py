"""What a scorer may return, and what is refused."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from millrace.rewards import BadOutcome, Outcome, read_outcome
from millrace.rewards.outcome import separate_rewards


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        (1, 1.0),
        (-0.25, -0.25),
        (True, 1.0),
        (Fraction(1, 4), 0.25),
        (Decimal("0.5"), 0.5),
        (np.float32(0.5), 0.5),
        (np.array(2), 2.0),
        (np.array([2.0]), 2.0),
        (np.bool_(True), 1.0),
        (np.float32(-1e15), -float(np.float32(1e15))),
    ],
)
def test_numbers_of_every_kind_are_scores(returned: object, score: float) -> None:
    assert read_outcome(returned) == Outcome(score)
    assert read_outcome({"score": returned, "acc": 1}) == Outcome(score, {"acc": 1})


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        (math.nan, "returned nan"),
        (-math.inf, "returned -inf"),
        (10**400, "returned inf"),
        (1e39, r"returned 1e\+39, not a number to compute with in float32; give a finite one of at most"),
        (np.float32("nan"), "returned nan"),
        (None, "returned None, not a number"),
        ("1.0", "returned '1.0', not a number"),
        ([1.0], r"returned \[1.0\], not a number"),
        (1j, "returned 1j, not a number"),
        (np.array([1.0, 2.0]), "not a number"),
        (np.array([]), "not a number"),
        ({"acc": 1.0}, "without `score`: {'acc': 1.0}"),
        ({"score": None}, "returned score None, not a number"),
        ({"score": math.nan}, "returned score nan"),
        ({"score": -3.5e38}, r"returned score -3\.5e\+38, not a number to compute with"),
    ],
)
def test_anything_else_is_refused(returned: object, complaint: str) -> None:
    with pytest.raises(BadOutcome, match=complaint):
        read_outcome(returned)


def test_details_become_plain() -> None:
    details = read_outcome(
        {"score": 1, "a": np.int64(3), "b": np.array([1, 2]), "c": math.nan, "d": (1, {2}), 5: {"x": None}, "e": object}
    ).details
    assert details == {"a": 3, "b": [1, 2], "c": "nan", "d": [1, [2]], "5": {"x": None}, "e": "<class 'object'>"}


def test_separate_rewards_are_found_by_name() -> None:
    details = {"format": 0.5, "short": True, "text": "x", "bad": "nan"}
    assert separate_rewards(1.0, details, ["score", "short", "format"]) == (1.0, 1.0, 0.5)
    assert separate_rewards(1.0, details, []) == ()
    for name, told in (("missing", "no 'missing'"), ("text", "text 'x', not a number")):
        with pytest.raises(BadOutcome, match=f"returned {told}"):
            separate_rewards(1.0, details, [name])
    with pytest.raises(BadOutcome, match="bad 'nan', not a number"):
        separate_rewards(1.0, details, ["bad"])
    with pytest.raises(BadOutcome, match=r"large 1e\+39, not a number to compute with"):
        separate_rewards(1.0, {"large": 1e39}, ["large"])

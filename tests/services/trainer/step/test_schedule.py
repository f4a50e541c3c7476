"""Learning rates by step, and seeds that never meet."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from services.trainer.step.schedule import learning_rate, random_seed
from tests.services.trainer.groups import job_spec


def rates(steps: int | None, **optimizer: Any) -> list[float]:
    spec = job_spec(Path("model"), trainer={"optimizer": {"lr": 1.0, **optimizer}}, schedule={"steps": steps})
    return [learning_rate(spec, step) for step in range(1, 11)]


def test_warm_up_then_constant() -> None:
    assert rates(None, warmup_steps=4) == [0.25, 0.5, 0.75] + [1.0] * 7
    assert rates(10) == [1.0] * 10


def test_linear_reaches_the_minimum_at_the_last_step() -> None:
    expected = [0.5, 1.0] + [1.0 - 0.9 * done / 8 for done in range(1, 9)]
    assert rates(10, warmup_steps=2, schedule="linear", min_lr=0.1) == pytest.approx(expected)


def test_cosine_is_half_way_in_the_middle() -> None:
    values = rates(10, warmup_steps=2, schedule="cosine", min_lr=0.2)
    assert values[5] == pytest.approx(0.6) and values[9] == pytest.approx(0.2)
    assert all(earlier >= later for earlier, later in pairwise(values[1:]))


def test_seeds_differ() -> None:
    spec, other = job_spec(Path("model")), job_spec(Path("model"), trainer={"seed": 1})
    seeds = {random_seed(s, step, rank) for s in (spec, other) for step in range(1, 50) for rank in range(8)}
    assert len(seeds) == 2 * 49 * 8 and all(0 <= seed < 1 << 63 for seed in seeds)
    assert random_seed(spec, 3, 1) == random_seed(spec, 3, 1)

"""Faults at random instants in a real job, as `make chaos` does them: three seeds, few faults each.

Whatever a seed finds is repeated with `python -m benchmarks.chaos --first SEED --seeds 1`.
"""

from pathlib import Path

import pytest

from benchmarks.chaos import table
from benchmarks.chaos.trial import Shape, trial

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(600)]

FAULTS = 3
SEEDS = (4, 6, 7)
"""Their first three faults strike Redis, a replica, a scorer, a trainer's rank and launcher, and the coordinator."""


@pytest.mark.parametrize("seed", SEEDS)
def test_what_always_holds_holds_under_faults(seed: int, tmp_path: Path) -> None:
    outcome = trial(seed, tmp_path, Shape(faults=FAULTS), lambda struck: print(table.line(struck)))
    assert len(outcome.struck) == FAULTS and outcome.steps > FAULTS
    assert outcome.sound, table.failure(outcome, table.repeating(seed, [f"--faults {FAULTS}"], Path("state/chaos")))

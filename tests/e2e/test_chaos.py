"""Faults at random instants in a real job, as `make chaos` does them: three seeds, few faults each, in `make test-all`.
`make test` has each kind of fault with one service that is real: tests/services/coordinator/test_recovery.py kills the
coordinator, test_trainer_kills.py the trainer, test_publication_faults.py a replica.

Whatever a seed finds is repeated with `python -m benchmarks.chaos --first SEED --seeds 1 --faults 3`.
"""

from pathlib import Path

import pytest

from benchmarks.chaos import table
from benchmarks.chaos.faults import Act, Target, draw, staleness
from benchmarks.chaos.trial import Shape, trial

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(600)]

SHAPE = Shape(faults=3)
SEEDS = (46, 77, 81)


def test_the_seeds_kill_every_kind_of_process_at_every_staleness() -> None:
    drawn = [fault for seed in SEEDS for fault in draw(seed, SHAPE.faults, SHAPE.targets)]
    assert {fault.target for fault in drawn if fault.act is Act.KILL} == set(Target) - {Target.ENGINE}
    assert {fault.act for fault in drawn} == set(Act) and {staleness(seed) for seed in SEEDS} == {0, 1, 2}


@pytest.mark.matrix
@pytest.mark.parametrize("seed", SEEDS)
def test_what_always_holds_holds_under_faults(seed: int, tmp_path: Path) -> None:
    outcome = trial(seed, tmp_path, SHAPE, lambda struck: print(table.line(struck)))
    repeat = table.repeating(seed, [f"--faults {SHAPE.faults}"], Path("state/chaos"))
    assert outcome.sound, table.failure(outcome, repeat)
    assert len(outcome.struck) == SHAPE.faults and outcome.steps > SHAPE.faults

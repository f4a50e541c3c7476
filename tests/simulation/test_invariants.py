"""What holds of every simulated job."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.simulation.job import Simulation
from millrace.simulation.setting import (
    Cycled,
    Fault,
    FaultKind,
    MeasuredRate,
    Setting,
    StalenessOf,
    TooStale,
    TrainerRate,
)
from tests.simulation.jobs import setting

SECONDS = st.floats(0.0, 20.0).map(lambda value: round(value, 2))
RATES = st.builds(
    lambda alone, more: MeasuredRate((0, 100), (alone, alone + 100 * more)), st.floats(0.01, 2.0), st.floats(0.0, 1.0)
)
TRAINERS = st.builds(TrainerRate, step_s=SECONDS, token_s=st.floats(0.0, 0.5), part_s=st.floats(0.0, 1.0))

MIXED = st.lists(st.integers(1, 60).map(float), min_size=1, max_size=12)


@st.composite
def jobs(draw: st.DrawFn, lengths: st.SearchStrategy[list[float]] = MIXED) -> Setting:
    samples = draw(st.integers(1, 4))
    found = draw(lengths)
    pause_s = draw(st.floats(0.0, 1.0))
    return Setting(
        prompts=draw(st.integers(1, 5)),
        samples=samples,
        lengths=Cycled(found, samples),
        engine=draw(RATES),
        trainer=draw(TRAINERS),
        prompt_tokens=draw(st.sampled_from([0.0, 7.0])),
        max_staleness=draw(st.integers(0, 3)),
        replicas=draw(st.integers(1, 3)),
        slots=draw(st.integers(1, 20)),
        cached_tokens=draw(st.sampled_from([float("inf"), 100.0])),
        publication_s=pause_s + draw(st.floats(0.0, 1.0)),
        pause_s=pause_s,
        recompute_cache=draw(st.booleans()),
        score_s=draw(st.floats(0.0, 2.0)),
        between_s=draw(st.floats(0.0, 2.0)),
        streaming=draw(st.booleans()),
        wait_for_slow=True,
        keep_partial=draw(st.booleans()),
        lease_while_away=draw(st.booleans()),
    )


@st.composite
def faults(draw: st.DrawFn) -> Sequence[Fault]:
    """Replicas that die, each with another one that joins later, and a trainer that restarts."""
    found = []
    for replica in range(draw(st.integers(0, 3))):
        time_s, away_s = draw(SECONDS), draw(SECONDS)
        found += [Fault(time_s, FaultKind.DIE, 0, away_s), Fault(time_s + draw(SECONDS), FaultKind.JOIN, replica)]
    for _ in range(draw(st.integers(0, 2))):
        found.append(Fault(draw(SECONDS), FaultKind.RESTART_TRAINER, seconds=draw(SECONDS)))
    return tuple(found)


@settings(max_examples=80)
@given(jobs(), faults(), st.booleans(), st.sampled_from(StalenessOf), st.sampled_from(TooStale), st.integers(0, 3))
def test_the_ledger_is_exact_and_nothing_is_trained_beyond_the_bound(
    job: Setting, faults: Sequence[Fault], slow: bool, of: StalenessOf, too_stale: TooStale, carried: int
) -> None:
    if job.max_staleness == 0 and too_stale is not TooStale.TRAIN:
        carried = 0  # such groups would be too late in every step, and a spec with it is refused
    struck = replace(
        job, faults=faults, wait_for_slow=slow, staleness_of=of, too_stale=too_stale, carried_prompts=carried
    )
    bounded = of is StalenessOf.OLDEST and too_stale is not TooStale.TRAIN
    for number, step in enumerate(Simulation(struck).run(6), 1):
        ledger = step.ledger
        assert ledger.issued == ledger.trained + ledger.in_flight + ledger.dropped
        assert ledger.trained == number * job.prompts
        assert step.answers == job.prompts * job.samples == sum(step.oldest.values())
        assert min(step.staleness) >= 0 and (max(step.oldest) <= job.max_staleness or not bounded)
        assert sum(step.staleness.values()) == pytest.approx(step.tokens - step.answers * job.prompt_tokens)
        assert all(0.0 <= share <= 1 + 1e-9 for share in step.replica_s)
        assert step.trainer_s <= step.seconds + 1e-6 or faults


@settings(max_examples=50)
@given(jobs(), st.integers(1, 8))
def test_no_step_takes_less_than_the_longer_side_at_full_load(job: Setting, steps: int) -> None:
    """From the beginning: all that is trained was generated since then."""
    found = Simulation(job).run(steps)
    tokens = sum(sum(step.staleness.values()) for step in found)
    fastest = max(running / job.engine.decode(running, 0.0) for running in range(1, job.slots + 1)) * job.replicas
    rate = job.trainer
    trained = sum(step.tokens for step in found) * rate.token_s + steps * (rate.step_s + rate.part_s)
    assert found[-1].end_s >= max(tokens / fastest, trained) * (1 - 1e-9)


@settings(max_examples=30)
@given(jobs(lengths=st.integers(1, 60).map(lambda length: [float(length)])))
def test_more_staleness_is_never_slower_where_all_answers_are_as_long(job: Setting) -> None:
    """The first steps may be slower: they share the engine with the prompts of later ones. On one replica: three
    prompts of a higher bound on two replicas leave one of them fuller, and so slower, however fair they share."""
    plain = replace(job, recompute_cache=False, pause_s=0.0, replicas=1)
    steps = 24
    seconds = [Simulation(replace(plain, max_staleness=bound)).run(steps)[-1].end_s for bound in range(4)]
    for bound, (before, after) in enumerate(pairwise(seconds), 1):
        assert after <= before * (1 + (bound + 1) / steps)


@settings(max_examples=30)
@given(jobs())
def test_streaming_is_never_slower_where_parts_cost_nothing(job: Setting) -> None:
    """At staleness 0, where both train the same groups."""
    plain = replace(job, max_staleness=0, trainer=replace(job.trainer, part_s=0.0))
    waits, streams = (Simulation(replace(plain, streaming=streaming)).run(6)[-1].end_s for streaming in (False, True))
    assert streams <= waits + 1e-6


def test_the_simulated_job_is_the_same_every_time() -> None:
    of = setting([1.0, 7.0, 2.0], prompts=3, samples=2, max_staleness=1, trainer=TrainerRate(1.0))
    assert Simulation(of).run(5) == Simulation(of).run(5)

"""Simulated jobs beside what they take by hand."""

from dataclasses import replace

import pytest

from millrace.errors import InvalidState
from millrace.simulation.job import Simulation, simulate
from millrace.simulation.outcome import Step
from millrace.simulation.setting import (
    Cycled,
    Drawn,
    Fault,
    FaultKind,
    MeasuredRate,
    Setting,
    StalenessOf,
    TooStale,
    TrainerRate,
)
from tests.simulation.jobs import setting


def ends(of: Setting, steps: int) -> list[float]:
    """When each of the first steps is published."""
    return [step.end_s for step in Simulation(of).run(steps)]


def first(of: Setting) -> Step:
    return Simulation(of).run(1)[0]


def test_without_staleness_the_sides_take_turns() -> None:
    lengths = Cycled([3.0, 5.0], samples=2)
    outcome = simulate(setting(lengths, samples=2, trainer=TrainerRate(2.0), publication_s=1.0), steps=3)
    assert outcome.step_s == 5 + 2 + 1
    assert outcome.trainer_idle == pytest.approx(5 / 8) and outcome.replica_idle == pytest.approx(3 / 8)
    assert outcome.tokens_per_s == pytest.approx(8 / 8)
    assert outcome.staleness == {0: 3 * 8.0} and outcome.max_staleness == 0


def test_with_staleness_the_sides_overlap() -> None:
    assert simulate(setting([4.0], max_staleness=1, slots=1, trainer=TrainerRate(4.0)), steps=3).step_s == 4.0
    alone = simulate(setting([4.0], max_staleness=1, slots=1, trainer=TrainerRate(3.0)), steps=3)
    assert alone.step_s == 4.0 and alone.trainer_idle == pytest.approx(1 / 4) and alone.replica_idle == 0.0


def test_requests_that_run_together_slow_each_other() -> None:
    rate = MeasuredRate((1, 2), (1.0, 1.5))
    both = setting(Cycled([2.0, 4.0], 1), prompts=2, engine=rate)
    assert first(both).seconds == 2 * 1.5 + 2 * 1.0
    assert first(replace(both, slots=1)).seconds == 2 + 4
    assert first(replace(both, replicas=2)).seconds == 4
    assert [rate.decode(running, 0.0) for running in (0.5, 1.5, 4)] == [1.0, 1.25, 2.5]


def test_the_cache_bounds_how_many_run() -> None:
    """The second request has room for its prompt only when the first has ended."""
    of = setting([4.0], prompts=2, prompt_tokens=10.0, cached_tokens=15.0)
    assert first(of).seconds == 8 and first(replace(of, cached_tokens=20.0)).seconds == 4


def test_prompts_are_read_once_a_group_and_again_after_a_publication() -> None:
    rate = MeasuredRate((1,), (1.0,), prefill_token_s=0.1)
    of = setting([4.0], samples=2, engine=rate, prompt_tokens=10.0)
    assert first(of).seconds == 1 + 4
    assert first(replace(of, prompt_s=0.5)).seconds == 1.5 + 4
    # At 1 the first prompt is published. The second has 30 tokens in the cache by then, and reads them again.
    again = setting([1.0, 20.0, 1.0], prompt_tokens=10.0, engine=rate, max_staleness=1, slots=2, recompute_cache=True)
    kept = replace(again, recompute_cache=False, wait_for_slow=True)
    again = replace(again, wait_for_slow=True)
    assert ends(kept, 2)[1] == pytest.approx(1 + 1 + 20 + 1)  # two prompts are read before, one after the publication
    assert ends(again, 2)[1] - ends(kept, 2)[1] == pytest.approx(0.1 * (10 + 1))
    seen = [ends(replace(each, prompt_s=0.01), 2)[1] for each in (kept, again)]
    assert seen[1] - seen[0] == pytest.approx(0.1 * (10 + 1) + 0.01, abs=0.002)


def test_a_pause_stops_what_runs() -> None:
    """The first publication, from 1 to 3, stops the second prompt for a second."""
    of = setting([1.0, 9.0], max_staleness=1, publication_s=2.0, wait_for_slow=True)
    assert ends(of, 2) == [3.0, 11.0] and ends(replace(of, pause_s=1.0), 2) == [3.0, 12.0]


def test_streaming_trains_groups_while_others_are_generated() -> None:
    of = setting([1.0, 4.0], prompts=2, trainer=TrainerRate(step_s=0.5, token_s=1.0))
    assert first(of).seconds == 4 + 5 + 0.5
    streamed = first(replace(of, streaming=True))
    assert streamed.seconds == 4 + 4 + 0.5 and streamed.trainer_s == 5.5
    parts = replace(of, streaming=True, trainer=TrainerRate(0.5, 1.0, part_s=0.25))
    assert first(parts).seconds == 4 + 4.25 + 0.5 and first(parts).trainer_s == 6.0


def test_the_oldest_groups_are_trained_first() -> None:
    """Of three groups that are complete at 3, two are trained: the third is a version older in the next step."""
    of = setting([2.0], prompts=1, max_staleness=2, slots=3, trainer=TrainerRate(5.0))
    steps = Simulation(of).run(4)
    assert [dict(step.oldest) for step in steps] == [{0: 1}, {1: 1}, {2: 1}, {2: 1}]


def test_a_group_that_comes_too_late_is_generated_again_or_waited_for() -> None:
    of = setting([1.0, 10.0, 1.0], max_staleness=1, trainer=TrainerRate(1.0))
    again = Simulation(of).run(6)
    assert [step.end_s for step in again] == [2, 4, 6, 8, 10, 12]
    assert sum(step.late for step in again) == 1 and sum(step.lost_tokens for step in again) == 10.0
    waits = Simulation(replace(of, wait_for_slow=True)).run(3)
    assert [step.end_s for step in waits] == [2, 11, 12] and not any(step.late for step in waits)
    assert dict(waits[1].staleness) == {1: 2.0, 0: 8.0}  # version 1 came at 2


def test_a_group_that_is_too_stale_may_be_trained_or_dropped() -> None:
    of = setting([1.0, 10.0, 1.0], max_staleness=1, trainer=TrainerRate(1.0))
    trained = Simulation(replace(of, too_stale=TooStale.TRAIN)).run(6)
    assert [step.end_s for step in trained] == [2, 4, 6, 8, 10, 11]
    assert dict(trained[-1].staleness) == {5: 2.0, 4: 2.0, 3: 2.0, 2: 2.0, 1: 2.0}
    dropped = Simulation(replace(of, too_stale=TooStale.DROP)).run(6)
    assert [step.end_s for step in dropped] == [2, 4, 6, 8, 10, 12]
    assert dropped[-1].ledger.dropped == 1 and sum(step.late for step in dropped) == 1


@pytest.mark.parametrize(
    ("of", "late"), [(StalenessOf.OLDEST, 1), (StalenessOf.MEAN, 0), (StalenessOf.VERSIONS, 0)], ids=str
)
def test_what_is_bounded_of_an_answer(of: StalenessOf, late: int) -> None:
    """The second prompt is complete at 10 and can be trained at 11, with version 5: its oldest token is 5 versions
    behind, its tokens 3.4 on average, and 5 versions sampled it."""
    made = setting([1.0, 10.0, 1.0], max_staleness=4, trainer=TrainerRate(2.0), staleness_of=of)
    steps = Simulation(made).run(6)
    assert sum(step.late for step in steps) == late and steps[-1].end_s == 13.0
    assert (5 in steps[-1].oldest) is (not late)


def test_carried_prompts_keep_the_engine_busy_during_the_update() -> None:
    """Without them nothing can be issued until the first step is published at 6; with one the engine goes on."""
    of = setting([4.0], trainer=TrainerRate(2.0), slots=1, too_stale=TooStale.TRAIN)
    assert ends(of, 3) == [6.0, 12.0, 18.0]
    assert ends(replace(of, carried_prompts=1), 3) == [6.0, 10.0, 14.0]


def test_scoring_and_what_the_loop_does_between_steps_take_time() -> None:
    assert ends(setting([4.0], score_s=2.0, between_s=1.0), 2) == [6.0, 12.0]
    assert ends(setting([4.0], score_s=2.0, between_s=8.0), 2) == [6.0, 14.0]


def test_a_lost_replica_costs_what_it_had_or_only_the_time_until_that_is_known() -> None:
    lost = (Fault(3.0, FaultKind.DIE, 0, seconds=1.0),)
    of = setting([4.0], replicas=2, prompts=2, slots=2, faults=lost)
    step = first(of)
    assert step.seconds == 4 + 4 and step.lost_tokens == 3.0
    kept = first(replace(of, keep_partial=True))
    assert kept.seconds == 4 + 1 and kept.lost_tokens == 0.0 and dict(kept.staleness) == {0: 8.0}
    alone = replace(of, replicas=1, faults=(*lost, Fault(5.0, FaultKind.JOIN)))
    assert first(alone).seconds == 5 + 4
    with pytest.raises(InvalidState, match="nobody has anything left to do"):
        first(replace(alone, faults=lost))


def test_a_trainer_that_restarts_takes_its_step_again_and_replicas_finish_what_they_hold() -> None:
    away = (Fault(5.0, FaultKind.RESTART_TRAINER, seconds=10.0),)
    of = setting([4.0], trainer=TrainerRate(2.0), max_staleness=1, slots=1, faults=away)
    assert ends(of, 3) == [17.0, 19.0, 23.0]  # the second prompt was begun at 4 and is complete at 8
    assert ends(replace(of, max_staleness=3), 4) == [17.0, 19.0, 21.0, 25.0]
    assert ends(replace(of, max_staleness=3, lease_while_away=True), 4) == [17.0, 19.0, 21.0, 23.0]


def test_a_job_whose_groups_come_too_late_again_and_again_ends_with_an_error() -> None:
    of = setting([2.0], carried_prompts=8)
    assert [step.late for step in Simulation(of).run(3)] == [0, 8, 8]
    with pytest.raises(InvalidState, match="9 groups came too late for step 2"):
        Simulation(replace(of, carried_prompts=9)).run(3)


def test_drawn_lengths_are_spread_evenly_over_each_steps_answers() -> None:
    lengths = [float(length) for length in range(1, 1001)]
    drawn = Drawn(lengths, prompts=4, samples=5)
    for step in range(3):
        found = sorted(drawn.of(4 * step + prompt, sample, 0) for prompt in range(4) for sample in range(5))
        assert all(50 * part < length <= 50 * (part + 1) for part, length in enumerate(found))
    first = [drawn.of(prompt, sample, 0) for prompt in range(4) for sample in range(5)]
    assert first != sorted(first) and first != [drawn.of(p, s, 1) for p in range(4) for s in range(5)]
    assert first == [Drawn(lengths, 4, 5).of(p, s, 0) for p in range(4) for s in range(5)]

"""The decision on closed loops: a pool whose steps take what the number of its replicas makes of them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.events import ScalingReason
from millrace.ids import JobId
from services.coordinator.scaling.decision import Decision, Limits, Pace, Seen, State, decide
from services.coordinator.scaling.figures import Figures, Look

JOB = JobId("job")
PACE = Pace()
LIMITS = Limits(1, 8)
SEEN = Seen(
    now=1000.0, works=True, ready=2, coming=0, prompts=64, wait=0.0, busy=1.0, load=0.9, steps=10, seconds=900.0
)
shares = st.floats(0, 1)
limits = st.tuples(st.integers(0, 6), st.integers(0, 10), st.floats(0, 5), st.floats(0, 20)).map(
    lambda drawn: Limits(drawn[0], max(drawn[0], drawn[1], 1), drawn[2], drawn[3])
)


@st.composite
def measured(draw: st.DrawFn) -> Seen:
    ready = draw(st.integers(0, 10))
    busy = draw(shares)
    return Seen(
        now=draw(st.floats(0, 1e5)),
        works=draw(st.booleans()),
        ready=ready,
        coming=draw(st.integers(0, 3)),
        prompts=draw(st.integers(0, 100)),
        wait=draw(shares),
        busy=busy,
        load=busy * draw(shares),
        steps=draw(st.integers(0, 20)),
        seconds=draw(st.floats(0, 1e4)),
    )


@given(measured(), measured(), limits, st.integers(0, 12), st.booleans())
def test_limits_and_budget_hold_whatever_is_measured(
    seen: Seen, long: Seen, bounds: Limits, wanted: int, grown: bool
) -> None:
    state = State.of(wanted, 0.0)
    if grown:
        state = replace(state, grown=(max(1, wanted // 2), 0.5, 1.0))
    after, decision = decide(state, seen, replace(long, now=seen.now), bounds, PACE)
    assert min(bounds.lowest, bounds.most) <= after.wanted <= bounds.highest
    assert after.wanted * bounds.price <= bounds.budget + 1e-6
    assert (decision is None) == (after.wanted == wanted)


@given(measured(), shares, shares, st.integers(1, 8))
def test_more_load_never_asks_for_fewer_replicas(seen: Seen, first: float, second: float, wanted: int) -> None:
    """More load: the trainer waits longer, or replicas are busy for longer."""
    state = State.of(wanted, -1e6)
    for name in ("wait", "busy"):
        few, many = (replace(seen, **{name: share}, load=0.0) for share in sorted((first, second)))
        low, high = (decide(state, each, each, LIMITS, PACE)[0].wanted for each in (few, many))
        assert low <= high, name


@given(measured(), st.integers(1, 8), st.floats(0, 29))
def test_nothing_but_limits_and_new_work_changes_a_number_that_was_just_changed(
    seen: Seen, wanted: int, since: float
) -> None:
    state = State.of(wanted, seen.now - since)
    assert decide(state, seen, seen, Limits(0, 8), PACE)[1] is None


@dataclass
class Plant:
    """A job whose step needs `work_s` seconds of one replica and `train_s` of the trainer, which overlap unless the job
    is synchronous. `least_s`: the longest answer, which more replicas do not make shorter."""

    work_s: float
    train_s: float
    least_s: float = 0.0
    overlap: bool = True
    start_s: float = 90.0

    def generates_s(self, replicas: int) -> float:
        return max(self.least_s, self.work_s / max(1, replicas))

    def run(
        self, hours: float, bounds: Limits = LIMITS, change: Callable[[float], "Plant"] | None = None
    ) -> list[tuple[float, Decision]]:
        """What is decided in so many hours, from the lowest number on."""
        figures, state, decisions = Figures(PACE.down_s), State.of(bounds.lowest, 0.0), []
        now, step, part, ready, arrivals = 0.0, 0, 0.0, bounds.lowest, list[float]()
        while now < hours * 3600:
            plant = change(now) if change is not None else self
            generate_s = plant.generates_s(ready)
            step_s = max(plant.train_s, generate_s) if plant.overlap else plant.train_s + generate_s
            generating = part < generate_s
            waits = part < (step_s - plant.train_s)
            fullest = 16 if generating else 0
            figures.add(
                Look(now, JOB, step, waits, ready, ready * generating, fullest * ready, fullest, len(arrivals), 64)
            )
            seen, long = figures.seen(PACE.up_s), figures.seen(PACE.down_s)
            state, decision = decide(state, seen, long, bounds, PACE)
            if decision is not None:
                decisions.append((now, decision))
                arrivals += [now + plant.start_s] * max(0, state.wanted - ready - len(arrivals))
                ready = min(ready, state.wanted)
            ready += sum(at <= now for at in arrivals)
            arrivals = [at for at in arrivals if at > now]
            now, part = now + 2.0, part + 2.0
            if part >= step_s:
                step, part = step + 1, 0.0
        return decisions


def turns(decisions: list[tuple[float, Decision]]) -> int:
    """How often the number went up after it went down, or the other way round."""
    ways = [decision.wanted > decision.before for _, decision in decisions]
    return sum(one is not other for one, other in pairwise(ways))


@settings(max_examples=12)
@given(st.floats(20, 400), st.floats(20, 60), st.floats(0, 60), st.booleans())
def test_a_constant_load_is_followed_once_and_does_not_flap(
    work_s: float, train_s: float, least_s: float, overlap: bool
) -> None:
    decisions = Plant(work_s, train_s, least_s, overlap).run(2)
    assert turns(decisions) <= 1, "at most one step back, after an increase without effect"
    assert not [at for at, _ in decisions if at > 3600], "and then nothing changes any more"


@pytest.mark.parametrize(("work_s", "replicas"), [(30.0, 1), (100.0, 3), (150.0, 4), (900.0, 8)])
def test_the_trainer_is_fed_by_as_many_as_it_takes(work_s: float, replicas: int) -> None:
    decisions = Plant(work_s, train_s=40.0).run(1)
    wanted = decisions[-1][1].wanted if decisions else 1
    assert wanted == replicas == min(8, math.ceil(work_s / 40.0 / 1.0 - 1e-9))


def test_a_synchronous_job_gets_as_many_as_generate_while_the_trainer_trains() -> None:
    decisions = Plant(work_s=120.0, train_s=40.0, overlap=False).run(2)
    assert decisions[-1][1].wanted == 3 and turns(decisions) == 0


def test_replicas_that_make_no_step_faster_are_given_back_and_not_tried_again_for_long() -> None:
    decisions = Plant(work_s=120.0, train_s=20.0, least_s=118.0).run(2)
    assert [(d.wanted, d.reason) for _, d in decisions[:2]] == [
        (2, ScalingReason.TRAINER_WAITS),
        (1, ScalingReason.NO_GAIN),
    ]
    assert len(decisions) == 2, "the load is the same"


def test_up_fast_and_down_slowly() -> None:
    heavy, light = Plant(work_s=120.0, train_s=40.0), Plant(work_s=30.0, train_s=40.0)
    decisions = heavy.run(3, change=lambda now: heavy if now < 3600 else light)
    up = [at for at, d in decisions if d.wanted > d.before]
    down = [at for at, d in decisions if d.wanted < d.before]
    assert max(up) < 1200 and min(down) > 3600
    assert decisions[-1][1].wanted == 1 and turns(decisions) == 1
    assert {d.reason for at, d in decisions if at > 3600} == {ScalingReason.REPLICAS_IDLE}


def test_a_dearer_replica_leaves_at_once_and_the_message_says_why() -> None:
    dear = Limits(1, 8, price=3.0, budget=7.0)
    state, decision = decide(State.of(4, 999.0), SEEN, SEEN, dear, PACE)
    assert state.wanted == 2 and decision is not None and decision.reason is ScalingReason.BUDGET
    assert decision.message == "2 replicas at most: they cost 3 an hour each, and the budget is 7"


def test_other_limits_hold_at_once() -> None:
    state, decision = decide(State.of(4, 999.0), SEEN, SEEN, Limits(1, 3), PACE)
    assert state.wanted == 3 and decision is not None and decision.reason is ScalingReason.LIMITS


def test_a_pool_of_none_gets_one_with_the_first_job_and_loses_it_after_the_last() -> None:
    idle = replace(SEEN, works=False, ready=0, busy=0.0)
    state, _ = decide(State.of(0, 0.0), idle, idle, Limits(0, 3), PACE)
    assert state.wanted == 0
    works = replace(idle, works=True, now=1100.0)
    state, decision = decide(state, works, works, Limits(0, 3), PACE)
    assert state.wanted == 1 and decision is not None and decision.reason is ScalingReason.WORK
    soon, later = (replace(idle, now=1100.0 + after, ready=1) for after in (PACE.down_s - 1, PACE.down_s + 1))
    assert decide(state, soon, soon, Limits(0, 3), PACE)[1] is None
    state, decision = decide(state, later, later, Limits(0, 3), PACE)
    assert state.wanted == 0 and decision is not None and decision.reason is ScalingReason.NO_WORK


def test_replicas_that_do_not_come_are_not_asked_for_in_larger_numbers() -> None:
    starved = replace(SEEN, wait=0.8)
    assert decide(State.of(3, 0.0), starved, starved, LIMITS, PACE)[1] is None, "two of three are there"
    assert decide(State.of(2, 0.0), replace(starved, coming=1), starved, LIMITS, PACE)[1] is None
    assert decide(State.of(2, 0.0), starved, starved, LIMITS, PACE)[1] is not None


def test_no_more_replicas_than_prompts() -> None:
    state, _ = decide(State.of(2, 0.0), replace(SEEN, wait=0.8, prompts=3), SEEN, LIMITS, PACE)
    assert state.wanted == 3


def look(at: float, step: int, waits: bool, ready: int = 1, running: int = 4) -> Look:
    return Look(at, JOB, step, waits, ready, min(ready, running), running, running, 0, 5)


def test_a_part_of_a_step_says_nothing_beside_whole_ones() -> None:
    """Steps of 10 s, the trainer waits in the first 4 of each."""
    figures = Figures(300.0)
    for second in range(57):
        figures.add(look(second, second // 10, second % 10 < 4))
    seen = figures.seen(30.0)
    assert (seen.steps, seen.seconds) == (3, 30.0) and seen.wait == pytest.approx(0.4)


def test_a_step_longer_than_those_before_counts() -> None:
    figures = Figures(300.0)
    for second in range(500):
        figures.add(look(second, min(second // 10, 4), waits=second >= 40))
    assert figures.seen(30.0).wait > 0.7


def test_a_change_of_the_pool_begins_anew() -> None:
    figures = Figures(300.0)
    for second in range(60):
        figures.add(look(second, second // 10, waits=second < 45, ready=1 if second < 45 else 2))
    seen = figures.seen(30.0)
    assert (seen.steps, seen.wait, seen.ready) == (0, 0.0, 2)


def test_busy_and_load_are_of_one_replica() -> None:
    figures = Figures(300.0)
    for second in range(40):
        running = 8 if second % 10 < 5 else 2
        figures.add(Look(second, JOB, second // 10, False, 4, 2, running, 4, 0, 5))
    seen = figures.seen(30.0)
    assert seen.busy == pytest.approx(0.5) and seen.load == pytest.approx(5 / (4 * 4))

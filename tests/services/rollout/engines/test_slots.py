"""The wait of samples in an engine with few slots."""

import pytest

from services.rollout.engines import versioned
from services.rollout.engines.versioned import Slots


def test_samples_get_slots_in_the_order_in_which_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(versioned.time, "monotonic", lambda: now)
    engine = Slots(lambda: 2)
    first, second, third, fourth = (engine.enter() for _ in range(4))
    now = 3.0
    engine.leave(second)
    now = 5.0
    engine.leave(fourth)  # aborted while it waited
    engine.leave(first)
    now = 9.0
    engine.leave(third)
    assert [each.waited_s for each in (first, second, third, fourth)] == [0.0, 0.0, 3.0, 5.0]
    assert engine.enter().waited_s == 0.0


def test_a_period_is_idle_while_no_sample_is_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(versioned.time, "monotonic", lambda: now)
    engine = Slots(lambda: 1)
    early = engine.enter()
    now = 5.0
    assert engine.next_period() is None  # the first
    now = 6.0
    second = engine.enter()
    now = 7.0
    engine.leave(early)
    now = 8.0
    engine.leave(second)
    now = 15.0
    assert engine.next_period() == 0.7
    third = engine.enter()
    now = 19.0
    assert engine.next_period() == 0.0
    now = 20.0
    engine.leave(third)
    now = 23.0
    assert engine.next_period() == 0.75
    engine.end_period()
    now = 30.0
    assert engine.next_period() is None

"""The rate of an engine, found again from the requests of a simulated one."""

import random

import pytest

from millrace.simulation.engine import Answer, Engine, Group
from millrace.simulation.setting import MeasuredRate, Request, fitted_rate
from tests.simulation.jobs import setting


def requests(rate: MeasuredRate, slots: int, replica: str = "a", count: int = 200) -> list[Request]:
    """What an engine does with requests of mixed lengths that all come at once."""
    engine, now, begun, found = Engine(setting([], engine=rate, slots=slots), 0.0, 0), 0.0, dict[Answer, float](), []
    mixed = random.Random(0)
    for place in range(count):
        group = Group(place, left=1)
        group.answers = [Answer(group, float(mixed.randint(1, 300)))]
        engine.take(group)
    engine.start()
    while engine.running:
        for _, _, answer in engine._running:
            begun.setdefault(answer, now)
        now = engine.next_end()
        engine.advance(now)
        found += [Request(replica, begun[answer], now, answer.length) for answer in engine.ended()]
        engine.start()
    return found


@pytest.mark.parametrize(("alone", "more"), [(0.002, 0.0001), (0.004, 0.0), (0.0005, 0.003)])
def test_the_constants_of_an_engine_are_found_again(alone: float, more: float) -> None:
    rate = MeasuredRate((0, 100), (alone, alone + 100 * more))
    found = fitted_rate([*requests(rate, 64), *requests(rate, 16, "b")])
    assert found is not None
    for running in (1.0, 8.0, 40.0, 64.0):
        assert found.decode(running, 0.0) == pytest.approx(rate.decode(running, 0.0), rel=0.02)


def test_requests_that_always_ran_together_give_one_rate() -> None:
    found = fitted_rate([Request("a", 0.0, 10.0, 100.0) for _ in range(4)])
    assert found is not None and found.decode(4, 0.0) == pytest.approx(0.1)
    assert fitted_rate([]) is None and fitted_rate([Request("a", 1.0, 1.0, 5.0), Request("a", 1.0, 2.0, 0.0)]) is None

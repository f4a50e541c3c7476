"""The simulator beside jobs that were measured on GPUs.

Two H100s, one trains and one generates, 1.4B parameters, 32 prompts x 8 answers of 450 tokens on average and 3,072 at
most. The engine's two constants come from the engine alone: 256 answers to their end take 14.2 s, 3,072 steps and
130,600 tokens; 8 answers take 2.36 ms for each step of the longest one, and 2.93 of them run on average. A step takes
a + b x running, so both are sums: 3072 a + 130600 b = 14.2 and a + 2.93 b = 0.00236.
"""

import math

import pytest

from millrace.planner.workload import _uncut_mean
from millrace.simulation.job import simulate
from millrace.simulation.outcome import Outcome
from millrace.simulation.setting import Drawn, MeasuredRate, Setting, TrainerRate

PER_REQUEST_S = (14.2 / 3072 - 0.00236) / (130_600 / 3072 - 2.93)
ALONE_S = 0.00236 - 2.93 * PER_REQUEST_S
"""Seconds of a step of the engine: 2.19 ms, and 57 microseconds for each request."""


def geometric(mean: float, longest: float, count: int = 4096) -> list[float]:
    theta = _uncut_mean(mean, longest)
    return [min(longest, -theta * math.log1p(-(place + 0.5) / count)) for place in range(count)]


def job(max_staleness: int, update_s: float, publication_s: float) -> Outcome:
    return simulate(
        Setting(
            prompts=32,
            samples=8,
            lengths=Drawn(geometric(450, 3072), 32, 8),
            engine=MeasuredRate((0, 1000), (ALONE_S, ALONE_S + 1000 * PER_REQUEST_S)),
            trainer=TrainerRate(token_s=update_s / (256 * (450 + 32))),
            prompt_tokens=32,
            max_staleness=max_staleness,
            publication_s=publication_s,
        ),
        steps=40,
    )


@pytest.mark.parametrize(
    ("max_staleness", "update_s", "publication_s", "measured_s"),
    [
        pytest.param(0, 2.6, 0.05, 15.5, id="0"),
        # On another host, whose engine may be up to 25 % slower than the one of the constants.
        pytest.param(1, 2.7, 0.07, 11.2, id="1"),
    ],
)
def test_steps_are_as_long_as_measured(
    max_staleness: int, update_s: float, publication_s: float, measured_s: float
) -> None:
    found = job(max_staleness, update_s, publication_s)
    error = found.step_s / measured_s - 1
    assert abs(error) < 0.15, error

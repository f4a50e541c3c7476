"""The overlong penalty, by hand."""

import pytest

from services.trainer.step.loss_inputs import overlong_penalty


@pytest.mark.parametrize(
    ("length", "expected"),
    [(10, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0), (10_000, -1.0)],
)
def test_overlong_penalty_is_equation_13(length, expected):
    assert overlong_penalty(length, limit=100, buffer=20) == pytest.approx(expected)
    assert overlong_penalty(length, limit=100, buffer=20, penalty=3.0) == pytest.approx(3 * expected)


def test_without_a_buffer_only_what_is_beyond_the_limit_is_punished():
    assert overlong_penalty(100, limit=100, buffer=0) == 0.0
    assert overlong_penalty(101, limit=100, buffer=0) == -1.0


@pytest.mark.parametrize("buffer", [-1, 101])
def test_a_buffer_beyond_the_limit_is_refused(buffer):
    with pytest.raises(ValueError, match="from 0 to the limit"):
        overlong_penalty(5, limit=100, buffer=buffer)

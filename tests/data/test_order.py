"""The order of a pass against a slow reference, and its promises."""

import hashlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.data import Order
from millrace.data.prompt_source import _splitmix64


def slow_order(length: int, pass_number: int, seed: int) -> list[int]:
    state = int.from_bytes(hashlib.blake2b(f"{seed}/{pass_number}".encode(), digest_size=8).digest(), "little")
    mask = 2**64 - 1
    keys = []
    for _ in range(length):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        keys.append(z ^ (z >> 31))
    return sorted(range(length), key=keys.__getitem__)


def test_the_generator_gives_its_published_values() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert _splitmix64(1234567, 4).tolist() == published


@given(st.integers(0, 300), st.integers(0, 5), st.integers(0, 2**70))
def test_it_is_the_reference_permutation(length: int, pass_number: int, seed: int) -> None:
    order = Order(length, pass_number, seed, shuffle=True)
    assert list(order) == slow_order(length, pass_number, seed)
    assert sorted(order) == list(range(length))
    assert len(order) == length


def test_an_order_that_must_never_change() -> None:
    assert list(Order(10, 0, 0, shuffle=True)) == slow_order(10, 0, 0) == [8, 1, 4, 2, 6, 0, 7, 3, 5, 9]


def test_passes_and_seeds_differ_and_repeat() -> None:
    orders = {tuple(Order(50, p, s, shuffle=True)) for p in range(5) for s in range(5)}
    assert len(orders) == 25
    assert list(Order(50, 3, 1, shuffle=True)) == list(Order(50, 3, 1, shuffle=True))
    assert list(Order(5, 3, 1, shuffle=False)) == [0, 1, 2, 3, 4]


def test_it_is_a_sequence() -> None:
    order = Order(6, 0, 0, shuffle=True)
    assert order[1:4] == list(order)[1:4]
    assert order[-1] == list(order)[-1]
    assert type(order[0]) is int and type(order[:2][0]) is int
    with pytest.raises(IndexError):
        order[6]


def test_every_row_comes_at_every_place_equally_often() -> None:
    counts = np.zeros((5, 5))
    for seed in range(4000):
        for place, row in enumerate(Order(5, 0, seed, shuffle=True)):
            counts[place, row] += 1
    # Each cell is binomial with mean 800 and deviation 25.3; five deviations would be a 1 in 70,000 accident.
    assert np.abs(counts - 800).max() < 5 * 25.3
    assert len(Counter(tuple(Order(4, 0, s, shuffle=True)) for s in range(1000))) == 24

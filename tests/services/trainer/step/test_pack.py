"""Packing against exhaustive search on small cases."""

from hypothesis import given
from hypothesis import strategies as st

from services.trainer.step.planning import pack, spread

BUDGET = 12


def fewest(lengths: list[int]) -> int:
    """By trying every home of every sequence."""

    def place(rest: list[int], rooms: tuple[int, ...]) -> int:
        if not rest:
            return len(rooms)
        head, *tail = rest
        fits = [place(tail, (*rooms[:i], room - head, *rooms[i + 1 :])) for i, room in enumerate(rooms) if head <= room]
        return min([*fits, place(tail, (*rooms, BUDGET - head))])

    return place(lengths, ())


@given(st.lists(st.integers(1, BUDGET), max_size=6))
def test_pack_is_within_one_of_the_fewest(lengths):
    bins = pack(lengths, BUDGET)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in members) <= BUDGET for members in bins)
    assert len(bins) <= fewest(lengths) + 1


def test_pack_by_hand():
    assert pack([4, 8, 2, 6, 4], 12) == [[1, 0], [3, 4, 2]]


@given(st.lists(st.integers(1, BUDGET), max_size=20), st.integers(1, 8))
def test_spread_keeps_the_budget_and_finds_room_where_there_is_plenty(lengths, count):
    bins = spread(lengths, [float(length**2) for length in lengths], BUDGET, count)
    if bins is None:
        # Something found no room, so every micro-batch holds more than the budget less the longest sequence.
        assert sum(lengths) > count * (BUDGET - max(lengths))
        return
    assert len(bins) == count
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in members) <= BUDGET for members in bins)


def test_spread_by_hand():
    assert spread([5, 5, 4, 3, 3], [5.0, 5, 4, 3, 3], 12, 2) == [[0, 2], [1, 3, 4]]
    assert spread([7, 7, 7], [7.0, 7, 7], 12, 2) is None
    # The first is the lightest but too full for 4 tokens; it takes the 3 that follow.
    assert spread([9, 8, 4, 3], [1.0, 5.0, 1.0, 1.0], 12, 2) == [[0, 3], [1, 2]]

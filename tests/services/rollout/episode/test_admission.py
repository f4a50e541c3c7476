"""Episodes go on by the cache: the limit's bounds and recovery, who waits, and what counts as a shortfall."""

import asyncio
import time
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.engine import CachedPrefix
from services.rollout.episode.admission import DECREASE, Admission, EpisodeLimit, Seen
from tests.services.rollout.coordinator import until

TURNS = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000), st.floats(-50, 0), st.integers(0, 99)))


@given(most=st.integers(1, 64), least=st.integers(1, 64), turns=TURNS)
def test_the_limit_keeps_its_bounds_and_recovers(
    most: int, least: int, turns: list[tuple[int, int, float, int]]
) -> None:
    limit = EpisodeLimit(most, min(least, most))
    now = 0.0
    for prefix, cached, age, active in turns:
        now += 1
        limit.turn(prefix, cached, now + age, active, now)
        limit.look(active, now)
        assert max(1, min(least, most)) <= limit.limit <= most
    limit.look(0, now)
    for _ in range(most * most):
        limit.turn(1000, 1000, now, limit.limit, now)
    assert limit.limit == most


def limits_over_time(most: int, fits: int, rounds: int) -> list[int]:
    """The limit after each round of turns of all episodes that go on: with more than `fits` of them, each finds half of
    its prefix."""
    limit, seen, now = EpisodeLimit(most), list[int](), 0.0
    for _ in range(rounds):
        active = limit.limit
        for _ in range(active):
            limit.turn(1000, 500 if active > fits else 1000, now, active, now + 1)
        now += 2
        limit.look(limit.limit, now)
        seen.append(limit.limit)
    return seen


def test_the_limit_comes_to_what_the_cache_holds_and_stays_near() -> None:
    seen = limits_over_time(most=256, fits=20, rounds=80)
    assert all(DECREASE * 19 <= limit <= 21 for limit in seen[20:]), seen
    assert max(seen[20:]) > 20, "it tries again what did not fit"
    assert limits_over_time(most=64, fits=64, rounds=5) == [64] * 5


def test_what_was_lost_before_a_decrease_took_effect_counts_once() -> None:
    limit = EpisodeLimit(100)
    limit.turn(1000, 0, since=1, active=100, now=2)
    assert limit.limit == 80
    limit.turn(1000, 0, since=3, active=90, now=4)
    assert limit.limit == 80, "90 still go on: the cache has not seen the 80 yet"
    limit.look(80, now=5)
    limit.turn(1000, 0, since=3, active=80, now=6)
    assert limit.limit == 80, "this prefix may have been lost before"
    limit.turn(1000, 0, since=6, active=80, now=7)
    assert limit.limit == 64, "this one was lost since"


def test_few_episodes_say_nothing_of_a_higher_limit_but_that_they_do_not_fit() -> None:
    limit = EpisodeLimit(100)
    limit.turn(1000, 0, since=1, active=10, now=2)
    assert limit.limit == 8
    for _ in range(100):
        limit.turn(1000, 1000, since=3, active=4, now=4)
    assert limit.limit == 8


def cached(tokens: int, key: str = "1.1") -> CachedPrefix:
    return CachedPrefix(tokens, block=16, key=key, at=time.monotonic())


@pytest.mark.parametrize(
    ("known", "before", "now", "limit"),
    [
        (159, "1.1", cached(144), 10),  # 9 whole blocks are all that can be there
        (159, "1.1", cached(32), 8),
        (159, "1.1", cached(0, key="2.2"), 10),  # a publication came between
        (15, "1.1", cached(0), 10),
    ],
    ids=["whole blocks", "short", "other weights", "less than a block"],
)
def test_only_a_prefix_that_a_larger_cache_had_is_short(known: int, before: str, now: CachedPrefix, limit: int) -> None:
    admission = Admission(EpisodeLimit(10))
    with ExitStack() as open_episodes:
        first, *_ = [open_episodes.enter_context(admission.place()) for _ in range(10)]
        admission.turn(first, Seen(known, cached(0, before)), now)
    assert admission.limit == limit
    counted = before == now.key
    assert admission.prefix_tokens == first.prefix_tokens == (known // 16 * 16 if counted else 0)


def test_the_oldest_go_on_and_a_resumed_episode_is_not_short() -> None:
    async def scenario() -> None:
        admission = Admission(EpisodeLimit(3))
        ends = [ExitStack() for _ in range(5)]
        places = [end.enter_context(admission.place()) for end in ends]
        began = [asyncio.create_task(admission.wait(place)) for place in places]
        await until(lambda: admission.waiting == 2)
        assert [task.done() for task in began] == [True, True, True, False, False] and admission.active == 3
        before = cached(0)
        admission.turn(places[0], Seen(160, before), cached(0))
        assert admission.limit == 2
        held = asyncio.create_task(admission.wait(places[2]))
        await until(lambda: admission.waiting == 3)
        began[3].cancel()
        await asyncio.wait([began[3]])
        assert admission.waiting == 2
        ends[0].close()
        await held
        assert not began[4].done(), "the older ones come first"
        admission.turn(places[2], Seen(160, before), cached(0))
        assert admission.limit == 2 and places[2].waited_s > 0
        ends[1].close()
        ends[3].close()
        await began[4]
        assert (admission.waiting, admission.active) == (0, 2)

    asyncio.run(scenario())

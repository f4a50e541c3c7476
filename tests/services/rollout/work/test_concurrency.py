"""Fewer slots are used where the engine's cache is too small, and more again where it is not."""

from services.rollout.work.leases import Concurrency


def slots_over_time(capacity: int, fits: int, rounds: int, overshoot: int = 0) -> list[int]:
    """The slots after each round of an engine whose cache has room for `fits` samples: it preempts the others. In each
    round first `overshoot` more episodes generate than there are slots, as a lease is for a whole group; afterwards
    nothing more is preempted."""
    concurrency, total, seen = Concurrency(capacity), 0, []
    for _ in range(rounds):
        total += max(0, concurrency.slots + overshoot - fits)
        concurrency.look(total, concurrency.slots + overshoot)
        concurrency.look(total, concurrency.slots)
        for _ in range(concurrency.slots):
            concurrency.ended()
        seen.append(concurrency.slots)
    return seen


def test_the_slots_come_to_what_the_cache_holds_and_stay_near() -> None:
    seen = slots_over_time(capacity=256, fits=100, rounds=80)
    assert seen[0] < 256 * 0.81 and sorted(seen[:3], reverse=True) == seen[:3], seen
    assert all(75 <= slots <= 102 for slots in seen[10:]), seen
    assert max(seen[10:]) >= 100, "it tries again what did not fit"


def test_a_group_more_than_the_slots_does_not_hide_preemptions() -> None:
    seen = slots_over_time(capacity=64, fits=20, rounds=80, overshoot=7)
    assert all(8 <= slots <= 14 for slots in seen[10:]), seen


def test_all_slots_are_used_where_nothing_is_preempted() -> None:
    assert slots_over_time(capacity=64, fits=64, rounds=5) == [64] * 5


def test_preemptions_before_a_decrease_took_effect_count_once() -> None:
    concurrency = Concurrency(100)
    concurrency.look(3, 100)
    assert concurrency.slots == 80
    concurrency.look(9, 95)
    assert concurrency.slots == 80, "95 still generate: the engine has not seen the 80 yet"
    concurrency.look(9, 80)
    assert concurrency.slots == 80, "nothing is new"
    concurrency.look(10, 86)
    assert concurrency.slots == 64, "80 have generated since: this one is new"


def test_few_long_samples_that_do_not_fit_tell_how_many_do() -> None:
    concurrency = Concurrency(100)
    concurrency.look(1, 10)
    assert concurrency.slots == 8


def test_preemptions_of_an_earlier_job_count_for_nothing() -> None:
    concurrency = Concurrency(10, preempted=500)
    concurrency.look(500, 10)
    assert concurrency.slots == 10


def test_there_is_always_a_slot_and_never_more_than_the_engine_has() -> None:
    concurrency = Concurrency(2)
    for total in range(1, 9):
        concurrency.look(total, 1)
        assert concurrency.slots == 1
    for _ in range(9):
        concurrency.ended()
    assert concurrency.slots == 2

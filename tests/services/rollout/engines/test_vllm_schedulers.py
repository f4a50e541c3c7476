"""vLLM's schedulers: what they tell, together; the preemptions among it, for want of room in a cache or because a pause
cleared it; and which of them gets a request."""

from types import SimpleNamespace

import pytest

from services.rollout.engine import EngineStats
from services.rollout.engines.vllm.schedulers import RequestPlaces, SchedulerStats


def step(stats: SchedulerStats, begun_again: int, waiting: int = 0) -> int:
    """A step of the scheduler in which preempted requests begin again; the preemptions that count so far."""
    prompts = SimpleNamespace(queries=10, hits=0, preempted_requests=begun_again)
    told = SimpleNamespace(num_running_reqs=4, num_waiting_reqs=waiting, kv_cache_usage=0.5, prefix_cache_stats=prompts)
    stats.record(scheduler_stats=told)
    assert stats.last is not None
    assert stats.idle.preempted == stats.last.preempted, "an engine that has nothing to do tells the same"
    return stats.last.preempted


def test_each_request_that_begins_again_was_preempted_once() -> None:
    stats = SchedulerStats()
    assert [step(stats, count, waiting=3) for count in (0, 2, 0, 1)] == [0, 2, 2, 3]


def test_requests_that_a_pause_cleared_do_not_count() -> None:
    stats = SchedulerStats()
    stats.cleared(4)
    assert [step(stats, *each) for each in ((0, 0), (3, 1), (1, 0))] == [0, 0, 0]
    assert step(stats, 1) == 1, "all four have begun again"


def test_requests_that_waited_when_a_pause_began_hide_no_preemption_once_nothing_waits() -> None:
    stats = SchedulerStats()
    stats.cleared(6)  # of which only 4 had a slot
    assert [step(stats, *each) for each in ((4, 2), (0, 0), (2, 1))] == [0, 0, 2]


def test_a_second_pause_begins_anew() -> None:
    stats = SchedulerStats()
    stats.cleared(5)
    assert step(stats, 2, waiting=3) == 0
    stats.cleared(2)
    assert step(stats, 3, waiting=1) == 1


def test_the_numbers_of_all_schedulers_are_told_together() -> None:
    stats = SchedulerStats()
    parallel = SimpleNamespace(data_parallel_size=2)
    stats.attach(
        SimpleNamespace(output_processor=SimpleNamespace(), vllm_config=SimpleNamespace(parallel_config=parallel)),
        others=False,
    )

    def told(rank: int, running: int, waiting: int, used: float) -> EngineStats | None:
        prompts = SimpleNamespace(queries=100, hits=40, preempted_requests=1)
        of_rank = SimpleNamespace(
            num_running_reqs=running, num_waiting_reqs=waiting, kv_cache_usage=used, prefix_cache_stats=prompts
        )
        stats.record(scheduler_stats=of_rank, engine_idx=rank)
        return stats.last

    assert told(1, 3, 1, 0.5) == EngineStats(3, 1, 0.25, 100, 40, 1)
    assert told(0, 4, 0, 0.25) == EngineStats(7, 1, 0.375, 200, 80, 2)
    assert told(0, 2, 0, 0.25) == EngineStats(5, 1, 0.375, 300, 120, 3)
    stats.rests(1)
    assert stats.last == EngineStats(2, 0, 0.125, 300, 120, 3)


BLOCK = 4


def places(ranks: int = 2, blocks: int = 1000, spread: int = 4) -> RequestPlaces:
    return RequestPlaces(ranks, BLOCK, blocks, spread)


def test_prompts_are_spread_and_samples_of_a_prompt_stay_together() -> None:
    given = places(ranks=3)
    prompts = [[number] * 10 for number in range(3)]
    assert [given.begin(prompt) for prompt in prompts for _ in range(4)] == [0] * 4 + [1] * 4 + [2] * 4


def test_a_turn_goes_where_the_turn_before_was_computed() -> None:
    given = places()
    prompts, answer = ([1] * 8, [2] * 8), [3] * 40
    for rank, prompt in enumerate(prompts):
        assert given.begin(prompt) == rank
        given.computed(rank, [*prompt, *answer])
        given.end(rank)
    assert [given.begin([*prompt, *answer, 5, 5]) for prompt in reversed(prompts)] == [1, 0]


def test_a_rank_with_many_more_requests_gets_no_further_ones() -> None:
    given = places(spread=4)
    assert [given.begin([1] * 8) for _ in range(9)] == [0] * 5 + [1] * 4, "then both have the prefix"
    assert given.begin([1] * 8) == 1


def test_prompts_that_only_begin_alike_are_spread() -> None:
    given = places()
    instructions = [7] * BLOCK
    assert [given.begin([*instructions, *[number] * 6]) for number in range(4)] == [0, 1, 0, 1]


def test_other_weights_have_no_prefixes() -> None:
    given = places()
    for _ in range(2):
        given.begin([1] * 8)
    given.forget()
    assert given.begin([1] * 8) == 1


def test_prefixes_that_the_caches_have_no_room_for_are_forgotten() -> None:
    given = places(blocks=2, spread=100)
    given.begin([1] * 8)
    assert given.begin([1] * 8) == 0
    assert given.begin([2] * 8) == 1
    assert given.begin([1] * 8) == 1, "both ranks have nothing of it; the second has fewer requests"


@pytest.mark.parametrize("block", [0, BLOCK])
def test_the_only_rank_computes_everything(block: int) -> None:
    given = RequestPlaces(1, block, 1000, 0)
    assert [given.begin([1] * 8) for _ in range(3)] == [0] * 3
    assert [given.end(0) for _ in range(3)] == [False, False, True]

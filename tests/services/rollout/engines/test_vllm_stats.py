"""Preemptions that vLLM's scheduler tells of: for want of room in its cache, or because a pause cleared the cache."""

from types import SimpleNamespace

from services.rollout.engines.vllm.stats import SchedulerStats


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

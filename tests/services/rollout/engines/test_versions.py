"""Marking versions ourselves, for engines that do not report them."""

import asyncio
from types import SimpleNamespace

import pytest

from millrace.ids import Version
from services.rollout.engine import VersionSpan
from services.rollout.engines.vllm.versions import VersionMarks


class PausedEngine:
    """The part of an AsyncLLM that the marks read: how many tokens of each request have arrived."""

    def __init__(self, arrivals: list[dict[str, int]]) -> None:
        self._arrivals = arrivals
        self.output_processor = self

    @property
    def request_states(self) -> dict[str, SimpleNamespace]:
        counts = self._arrivals.pop(0) if len(self._arrivals) > 1 else self._arrivals[0]
        return {
            f"internal-{name}": SimpleNamespace(
                external_req_id=name, detokenizer=SimpleNamespace(num_output_tokens=lambda count=count: count)
            )
            for name, count in counts.items()
        }


def spans(*parts: tuple[int, int, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(Version(v), start, end) for v, start, end in parts)


def test_tokens_belong_to_the_version_that_was_in_place() -> None:
    marks = VersionMarks()
    marks.began("a", Version(1))
    marks.began("b", Version(1))
    asyncio.run(marks.swapped(PausedEngine([{"a": 3, "b": 0}]), Version(2)))
    marks.began("c", Version(2))
    asyncio.run(marks.swapped(PausedEngine([{"a": 3, "b": 5, "c": 2}]), Version(3)))
    for name in "abc":
        marks.ended(name)
    assert marks.spans("a", 9) == spans((1, 0, 3), (3, 3, 9))
    assert marks.spans("b", 6) == spans((2, 0, 5), (3, 5, 6))
    assert marks.spans("c", 4) == spans((2, 0, 2), (3, 2, 4))


def test_a_sample_that_ended_before_the_swap_has_one_version() -> None:
    marks = VersionMarks()
    marks.began("a", Version(1))
    asyncio.run(marks.swapped(PausedEngine([{"a": 7}]), Version(2)))
    marks.ended("a")
    assert marks.spans("a", 7) == spans((1, 0, 7))


@pytest.mark.parametrize("told_s", [0.0, 0.01])
def test_a_sample_that_the_engine_counts_no_more_has_one_version(told_s: float) -> None:
    marks = VersionMarks()
    marks.began("a", Version(1))
    marks.began("b", Version(1))

    async def ends_as_the_version_comes() -> None:
        swapping = asyncio.create_task(marks.swapped(PausedEngine([{"b": 2}]), Version(2)))
        await asyncio.sleep(told_s)
        marks.ended("a")
        await swapping

    asyncio.run(ends_as_the_version_comes())
    marks.ended("b")
    assert marks.spans("a", 7) == spans((1, 0, 7))
    assert marks.spans("b", 3) == spans((1, 0, 2), (2, 2, 3))


def test_tokens_still_on_their_way_when_the_engine_paused_are_counted() -> None:
    marks = VersionMarks()
    marks.began("a", Version(1))
    asyncio.run(marks.swapped(PausedEngine([{"a": 3}, {"a": 4}, {"a": 5}, {"a": 5}]), Version(2)))
    marks.ended("a")
    assert marks.spans("a", 8) == spans((1, 0, 5), (2, 5, 8))


def test_a_forgotten_request_has_no_spans() -> None:
    marks = VersionMarks()
    marks.began("a", Version(1))
    marks.forget("a")
    with pytest.raises(KeyError):
        marks.spans("a", 1)

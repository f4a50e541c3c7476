"""Marking versions ourselves, for engines that do not report them."""

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.errors import PublicationFailed
from millrace.ids import Version
from services.rollout.engine import VersionSpan
from services.rollout.engines.vllm import versions
from services.rollout.engines.vllm.versions import VersionMarks


class PausedEngine:
    """What the marks read of an AsyncLLM that is paused: the tokens of each request, and outputs that it has still to
    take from its queue, one output being the tokens of each request from then on."""

    def __init__(self, marks: VersionMarks, *counts: dict[str, int], turns: int = 0) -> None:
        self.engine_core = self.output_processor = self
        self.request_states: dict[str, SimpleNamespace] = {}
        self.outputs_queue: asyncio.Queue[dict[str, int]] = asyncio.Queue()
        self._turns = turns
        self._count(counts[0])
        for later in counts[1:]:
            self.outputs_queue.put_nowait(later)
        marks.attach(self)

    async def get_output_async(self) -> dict[str, int]:
        return await self.outputs_queue.get()

    async def handle_outputs(self) -> None:
        """AsyncLLM's task, which lets others run between taking an output and counting its tokens."""
        while True:
            output = await self.get_output_async()
            for _ in range(self._turns):
                await asyncio.sleep(0)
            self._count(output)

    def while_handling(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` beside AsyncLLM's task."""

        async def both() -> None:
            handling = asyncio.create_task(self.handle_outputs())
            await work
            handling.cancel()

        asyncio.run(both())

    def _count(self, counts: dict[str, int]) -> None:
        self.request_states = {
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
    PausedEngine(marks, {"a": 3, "b": 0}).while_handling(marks.swapped(Version(2)))
    marks.began("c", Version(2))
    PausedEngine(marks, {"a": 3, "b": 5, "c": 2}).while_handling(marks.swapped(Version(3)))
    for name in "abc":
        marks.ended(name)
    assert marks.spans("a", 9) == spans((1, 0, 3), (3, 3, 9))
    assert marks.spans("b", 6) == spans((2, 0, 5), (3, 5, 6))
    assert marks.spans("c", 4) == spans((2, 0, 2), (3, 2, 4))


def test_a_sample_that_ended_before_the_swap_has_one_version() -> None:
    marks = VersionMarks()
    marks.began("a", Version(1))
    PausedEngine(marks, {"a": 7}).while_handling(marks.swapped(Version(2)))
    marks.ended("a")
    assert marks.spans("a", 7) == spans((1, 0, 7))


@pytest.mark.parametrize("told_s", [0.0, 0.01])
def test_a_sample_that_the_engine_counts_no_more_has_one_version(told_s: float) -> None:
    marks = VersionMarks()
    marks.began("a", Version(1))
    marks.began("b", Version(1))

    async def ends_as_the_version_comes() -> None:
        swapping = asyncio.create_task(marks.swapped(Version(2)))
        await asyncio.sleep(told_s)
        marks.ended("a")
        await swapping

    PausedEngine(marks, {"b": 2}).while_handling(ends_as_the_version_comes())
    marks.ended("b")
    assert marks.spans("a", 7) == spans((1, 0, 7))
    assert marks.spans("b", 3) == spans((1, 0, 2), (2, 2, 3))


@pytest.mark.parametrize("turns", [0, 1, 7])
def test_tokens_still_on_their_way_when_the_engine_paused_are_counted(turns: int) -> None:
    marks = VersionMarks()
    marks.began("a", Version(1))
    engine = PausedEngine(marks, {"a": 3}, {"a": 4}, {"a": 5}, turns=turns)
    engine.while_handling(marks.swapped(Version(2)))
    marks.ended("a")
    assert marks.spans("a", 8) == spans((1, 0, 5), (2, 5, 8))


@pytest.mark.parametrize(
    ("counts", "why"), [(({"b": 3},), "1 of 2 requests"), (({"a": 1, "b": 3}, {"b": 4}), ".* not all counted")]
)
def test_tokens_that_are_never_counted_fail_the_publication(
    counts: tuple[dict[str, int], ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "SETTLE_S", 0.05)
    marks = VersionMarks()
    for name in "ab":
        marks.began(name, Version(1))
    PausedEngine(marks, *counts)  # nobody handles its outputs
    with pytest.raises(PublicationFailed, match=f"^version 2: {why}"):
        asyncio.run(marks.swapped(Version(2)))
    for name in "ab":
        marks.ended(name)
        assert marks.spans(name, 5) == spans((1, 0, 5))


def test_a_forgotten_request_has_no_spans() -> None:
    marks = VersionMarks()
    marks.began("a", Version(1))
    marks.forget("a")
    with pytest.raises(KeyError):
        marks.spans("a", 1)

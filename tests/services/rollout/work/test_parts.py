"""Leases that are continued: what a replica reports of them, and what the next one makes of it."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.contracts.trajectories import assembled, within
from millrace.contracts.v1 import common_pb2, work_pb2
from millrace.wire.arrays import pack_logprobs, pack_tokens, unpack_logprobs, unpack_tokens
from services.rollout.engine import Partial, Response, VersionSpan
from services.rollout.work.groups import prefixes, reported, unreported
from tests.models import random_model
from tests.services.rollout.coordinator import until
from tests.services.rollout.jobs import job_spec
from tests.services.rollout.reference import logprobs
from tests.services.rollout.stack import Stack, replica_stack

LONG: dict[str, Any] = {
    "rollout": {"samples_per_prompt": 4, "max_response_tokens": 3000},
    "trainer": {"token_budget": 8192},
}


def part(start: int, tokens: list[int], version: int = 1, request: int = 0) -> work_pb2.Part:
    spans = [common_pb2.VersionSpan(version=version, start=0, end=len(tokens))]
    scores = pack_logprobs([-float(token) for token in tokens])
    return work_pb2.Part(request=request, start=start, tokens=pack_tokens(tokens), logprobs=scores, versions=spans)


def test_parts_are_put_together() -> None:
    other = part(0, [9], request=2)
    whole, second = assembled([other, part(0, [1, 2, 3]), part(3, [4]), part(2, [3, 4, 5]), part(5, [6], version=2)])
    assert (whole.request, second) == (0, other)
    assert unpack_tokens(whole.tokens).tolist() == [1, 2, 3, 4, 5, 6]
    assert unpack_logprobs(whole.logprobs).tolist() == [-1, -2, -3, -4, -5, -6]
    assert [(v.version, v.start, v.end) for v in whole.versions] == [(1, 0, 5), (2, 5, 6)]
    assert within([whole, second], 1, 1) == [second]
    assert within([whole, second], 0, 2) == [whole, second]


def test_parts_that_contradict_themselves_are_left_out() -> None:
    known, gap = part(0, [1, 2]), part(3, [4])
    short, odd, uncovered, torn = (part(2, [3]) for _ in range(4))
    short.logprobs, odd.tokens = b"", b"123"
    uncovered.versions[0].start = 1
    torn.experts.CopyFrom(common_pb2.Experts(chosen=b"12345", layers=2, per_token=2))
    assert assembled([known, gap, short, odd, uncovered, torn]) == [known]
    assert [unpack_tokens(one.tokens).tolist() for one in assembled([known, part(0, [7])])] == [[7]]


def test_what_was_reported_is_not_reported_again() -> None:
    before = Partial(np.array([1, 2], np.int32), np.array([-1, -2], np.float32), (VersionSpan(1, 0, 2),))  # type: ignore[arg-type]
    response = Response(before)
    more = Partial(np.array([3, 4], np.int32), np.array([-3, -4], np.float32), (VersionSpan(2, 0, 2),))  # type: ignore[arg-type]
    response.follow(more.after)
    assert unreported({5: response}) == unreported({5: response}) == [part(2, [3, 4], version=2, request=5)]
    reported({5: response}, unreported({5: response}))
    assert unreported({5: response}) == []
    response = Response(before)
    response.shorten(1)
    response.follow(more.after)
    assert unreported({5: response}) == [part(1, [3, 4], version=2, request=5)]


def known(stack: Stack) -> list[int]:
    """How many tokens the coordinator knows of each answer of the first lease."""
    return [len(one) for one in prefixes(stack.coordinator.parts.get("lease-0", [])).values()]


async def begun(stack: Stack, least: int = 20) -> None:
    """Waits until the coordinator knows `least` tokens of each of the four answers."""
    await until(lambda: len(known(stack)) == 4 and min(known(stack)) >= least)


async def cut(stack: Stack, least: int) -> int:
    """Has the first lease lost once the coordinator knows `least` tokens of each answer. Returns how many it knows."""
    await begun(stack, least)
    stack.coordinator.lost.add("lease-0")
    await until(lambda: stack.replica.load().running == 0)
    stack.coordinator.lost.clear()
    return sum(known(stack))


@pytest.mark.parametrize("end", ["lost", "drained"])
def test_greedy_answers_are_the_same_with_and_without_a_move(end: str, tied_model: Path) -> None:
    async def scenario() -> None:
        async with replica_stack(lease_s=0.2) as stack:
            await stack.serve(job_spec(tied_model, **LONG))
            asked: dict[str, Any] = {"samples": 3, "max_response_tokens": 400, "greedy_baseline": True}
            question = [{"role": "user", "content": "how"}]
            asked["temperature"] = 0.0
            stack.coordinator.issue(0, prompt=question, **asked)
            if end == "lost":
                before = await cut(stack, 20)
            else:
                await begun(stack)
                await stack.replica.leases.release("the replica ends")
                before = sum(known(stack))
            generated = stack.replica.leases.generated_tokens
            stack.coordinator.issue_again("lease-0")
            await until(lambda: stack.coordinator.answered == 1)
            rest = stack.replica.leases.generated_tokens - generated
            stack.coordinator.issue(1, prompt=question, **asked)
            await until(lambda: stack.coordinator.answered == 2)
            moved, whole = (stack.coordinator.groups[f"0-{row}"] for row in (0, 1))
            assert rest == 4 * 400 - before, "nothing that is known was generated again"
            for one, other in zip(moved.trajectories, whole.trajectories, strict=True):
                assert (one.tokens, one.text, one.stop_reason) == (other.tokens, other.text, other.stop_reason)
                assert np.abs(unpack_logprobs(one.logprobs) - unpack_logprobs(other.logprobs)).max() < 1e-3

    asyncio.run(scenario())


def test_a_moved_answer_has_the_versions_and_log_probabilities_of_both(tied_model: Path) -> None:
    async def scenario() -> None:
        async with replica_stack(lease_s=0.2) as stack:
            await stack.serve(job_spec(tied_model, **LONG), version=1)
            stack.coordinator.issue(0, samples=4, max_response_tokens=600)
            await cut(stack, 3)
            before = prefixes(stack.coordinator.parts["lease-0"])
            await stack.publish(2)
            stack.coordinator.issue_again("lease-0")
            await until(lambda: stack.coordinator.answered == 1)
            group = stack.coordinator.groups["0-0"]
            prompt, models = (
                unpack_tokens(group.prompt_tokens).tolist(),
                (random_model(tied=True, seed=s) for s in (1, 2)),
            )
            first, second = models
            for number, trajectory in enumerate(group.trajectories):
                tokens, known = unpack_tokens(trajectory.tokens), len(before[number])
                assert list(tokens[:known]) == list(before[number].tokens)
                spans = [(1, 0, known), (2, known, len(tokens))]
                assert [(v.version, v.start, v.end) for v in trajectory.versions] == [s for s in spans if s[1] < s[2]]
                old, new = (logprobs(model, prompt, tokens.tolist()) for model in (first, second))
                expected = np.concatenate([old[:known], new[known:]])
                assert np.abs(unpack_logprobs(trajectory.logprobs) - expected).max() < 1e-3

    asyncio.run(scenario())

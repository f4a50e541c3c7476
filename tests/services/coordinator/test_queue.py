"""Who may lease what, and how much."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from millrace.errors import Fenced, NotFound
from millrace.ids import Fence, JobId, LeaseId, MemberId, PromptId, Version
from millrace.spec import parse
from millrace.wire.channel import PROTOCOL_VERSION
from millrace.wire.v1 import fleet_pb2, work_pb2
from services.coordinator.events import Events
from services.coordinator.fleet import Fleet, Patience
from services.coordinator.measures import Measures
from services.coordinator.members import Configured, Member, Weights
from services.coordinator.queue import Queue, Standing, Terms
from services.coordinator.stages.issue import training_sampling
from services.coordinator.store import Draft, Purpose, Store
from tests.services.coordinator.redis import a_job, with_store

JOB = a_job()
TERMS = Terms(lease_s=30.0, samples={Purpose.TRAIN: 4, Purpose.EVALUATION: 1})


def weights(version: int, lineage: int = 0, job: str = JOB.id) -> Weights:
    return Weights(JobId(job), lineage, Version(version))


@pytest.mark.parametrize(
    ("held", "train", "evaluate"),
    [
        (None, False, False),
        (weights(5), True, True),
        (weights(4), True, False),
        (weights(3), False, False),
        (weights(6), False, False),
        (weights(5, lineage=1), False, False),
        (weights(5, job="job-other"), False, False),
    ],
)
def test_leases_are_for_those_who_hold_the_version(held: Weights | None, train: bool, evaluate: bool) -> None:
    standing = Standing(weights(5), max_staleness=1, terms=TERMS)
    assert standing.allows(held, Purpose.TRAIN) is train
    assert standing.allows(held, Purpose.EVALUATION) is evaluate


def test_a_greedy_baseline_is_a_request_more() -> None:
    tree = {"name": "a job", "output": "/out", "model": {"path": "/model"}, "data": {"files": ["train.parquet"]}}
    for name, more in (("grpo", 0), ("remax", 1)):
        spec = parse({**tree, "algorithm": {"advantage": {"name": name}}})
        terms, samples = Terms.of(spec), spec.rollout.samples_per_prompt
        assert (terms.requests(Purpose.TRAIN), terms.samples[Purpose.TRAIN]) == (samples + more, samples)
        assert terms.requests(Purpose.EVALUATION) == terms.samples[Purpose.EVALUATION]
        assert training_sampling(spec).greedy_baseline is bool(more)


class Desk:
    """A queue over a real store, with one member that holds version 0."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.fleet = Fleet(store, Patience(1.0, 5.0))
        self.queue = Queue(store, self.fleet, Events(store), Measures())
        self.queue.standing = Standing(weights(0), 0, TERMS)

    async def member(self, name: str = "rollout-a", port: int = 1) -> Member:
        request = fleet_pb2.RegisterRequest(
            member_id=name,
            kind=fleet_pb2.MEMBER_KIND_ROLLOUT,
            address=f"127.0.0.1:{port}",
            protocol_version=PROTOCOL_VERSION,
        )
        await self.fleet.register(request)
        member = self.fleet.member(name)
        await self.fleet.configured(member, Configured(JOB.id, 1, "float32"))
        await self.fleet.hold(member, weights(0))
        return member

    async def issue(self, count: int, purpose: Purpose = Purpose.TRAIN) -> None:
        names = [PromptId(f"{'e' if purpose is Purpose.EVALUATION else ''}0-{n}") for n in range(count)]
        drafts = [Draft(name, work_pb2.Lease(prompt_id=name).SerializeToString()) for name in names]
        await self.store.prompts(JOB.id, purpose).issue(drafts, 0)
        self.queue.issued.ring()

    async def lease(self, free: int, wait_s: float = 0.0, name: str = "rollout-a") -> list[str]:
        leases, self.reason = await self.queue.lease(MemberId(name), free, wait_s)
        return [lease.prompt_id for lease in leases]


def at_the_desk(url: str, scenario: Callable[[Desk], Awaitable[None]]) -> None:
    async def run(store: Store) -> None:
        await store.jobs.create(JOB)
        await scenario(Desk(store))

    with_store(url, run)


def test_a_prompt_is_leased_only_if_all_its_samples_fit(redis_url: str) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.member()
        await desk.issue(5)
        assert await desk.lease(9) == ["0-0", "0-1"]
        assert await desk.lease(3) == []
        assert await desk.lease(4) == ["0-2"]

    at_the_desk(redis_url, scenario)


def test_one_prompt_is_leased_where_nothing_runs(redis_url: str) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.member()
        await desk.issue(2)
        assert await desk.lease(3) == ["0-0"]
        assert await desk.lease(3) == []

    at_the_desk(redis_url, scenario)


def test_one_prompt_is_leased_again_after_a_lease_has_expired(redis_url: str) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.member()
        await desk.issue(1)
        for _ in range(2):
            assert await desk.lease(3) == ["0-0"]
            assert await desk.lease(3) == []
            await desk.store.prompts(JOB.id).expire(0.0)

    at_the_desk(redis_url, scenario)


def test_evaluation_goes_first(redis_url: str) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.member()
        await desk.issue(2)
        await desk.issue(3, Purpose.EVALUATION)
        assert await desk.lease(8) == ["e0-0", "e0-1", "e0-2", "0-0"]

    at_the_desk(redis_url, scenario)


def test_a_draining_member_and_one_without_weights_get_none(redis_url: str) -> None:
    async def scenario(desk: Desk) -> None:
        member = await desk.member()
        await desk.issue(1)
        member.weights = None
        assert await desk.lease(8) == [] and "no verified weights" in desk.reason
        await desk.fleet.hold(member, weights(0))
        await desk.fleet.drain(member.id)
        assert await desk.lease(8, wait_s=5.0) == [] and "drains" in desk.reason
        with pytest.raises(NotFound, match="rollout-z is not in the fleet"):
            await desk.lease(8, name="rollout-z")
        desk.queue.standing = None
        assert await desk.lease(8) == [] and desk.reason == "no job runs"

    at_the_desk(redis_url, scenario)


def test_whoever_waits_is_woken_by_new_prompts_and_by_new_weights(redis_url: str) -> None:
    async def scenario(desk: Desk) -> None:
        member = await desk.member()
        waiting = asyncio.create_task(desk.lease(8, wait_s=60.0))
        await asyncio.sleep(0.1)
        await desk.issue(1)
        assert await asyncio.wait_for(waiting, 10.0) == ["0-0"]
        member.weights = None
        await desk.issue(2)
        waiting = asyncio.create_task(desk.lease(8, wait_s=60.0))
        await asyncio.sleep(0.1)
        await desk.fleet.hold(member, weights(0))
        desk.fleet.bell.ring()
        assert await asyncio.wait_for(waiting, 10.0) == ["0-1"]

    at_the_desk(redis_url, scenario)


def test_what_a_lost_member_held_goes_to_others(redis_url: str) -> None:
    async def scenario(desk: Desk) -> None:
        first, _ = await desk.member(), await desk.member("rollout-b", 2)
        await desk.issue(2)
        (lease, _), _ = await desk.queue.lease(first.id, 8, 0.0)
        ref = (LeaseId(lease.ref.lease_id), Fence(lease.ref.fence))
        epoch = desk.fleet.epoch
        await desk.fleet.leave(first.id, "")
        assert desk.fleet.epoch == epoch + 1
        assert await desk.lease(8, name="rollout-b") == ["0-0", "0-1"]
        with pytest.raises(Fenced, match=r"lease t\S+ with fence 1 is over"):
            await desk.queue.refuse(first.id, JOB.id, ref, "reward: late")

    at_the_desk(redis_url, scenario)


def test_an_answer_is_taken_once(redis_url: str) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.member()
        await desk.issue(1)
        (lease,), _ = await desk.queue.lease(MemberId("rollout-a"), 8, 0.0)
        ref: Any = (LeaseId(lease.ref.lease_id), Fence(lease.ref.fence))
        for _ in range(2):
            await desk.queue.refuse(MemberId("rollout-a"), JOB.id, ref, "prompt_too_long: 9 > 8 tokens")
        view = await desk.store.prompts(JOB.id).view()
        assert (view.dropped, view.reasons) == (1, {"prompt_too_long": 1})

    at_the_desk(redis_url, scenario)

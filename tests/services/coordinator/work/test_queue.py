"""Who may lease what, and how much."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from millrace.contracts.v1 import common_pb2, work_pb2
from millrace.drops import Drop, DropReason
from millrace.errors import Fenced, NotFound
from millrace.ids import JobId, MemberId, Purpose, Version
from millrace.spec import parse
from services.coordinator.fleet.fleet import Fleet
from services.coordinator.fleet.partition import Partition
from services.coordinator.observe.events import Events
from services.coordinator.observe.prometheus import PrometheusMetrics
from services.coordinator.stages.issue import training_sampling
from services.coordinator.state.lease import LeaseRef
from services.coordinator.state.member import Configured, Member, Patience, Weights
from services.coordinator.store import Store, connection, prompts
from services.coordinator.work import queue
from services.coordinator.work.queue import Queue
from services.coordinator.work.terms import LeaseTerms, RunningJob
from tests.services.coordinator.cluster import until
from tests.services.coordinator.redis import a_job, queued, registration, with_store

JOB = a_job()
TERMS = LeaseTerms(lease_s=30.0, samples={Purpose.TRAIN: 4, Purpose.EVALUATION: 1})


def weights(version: int, lineage: int = 0, job: str = JOB.id) -> Weights:
    return Weights(JobId(job), lineage, Version(version))


@pytest.mark.parametrize(
    ("held", "train", "evaluated"),
    [
        (None, False, None),
        (weights(5), True, 5),
        (weights(4), True, 4),
        (weights(3), False, 3),
        (weights(6), False, 6),
        (weights(5, lineage=1), False, None),
        (weights(5, job="job-other"), False, None),
    ],
)
def test_leases_are_for_those_who_hold_the_version(held: Weights | None, train: bool, evaluated: int | None) -> None:
    for version in (None, 3, 4, 5, 6):
        job = RunningJob(weights(5), max_staleness=1, terms=TERMS, evaluated=version and Version(version))
        assert job.allows(held, Purpose.TRAIN) is train
        may = version is not None and version == evaluated
        assert job.allows(held, Purpose.EVALUATION) is may
        assert job.allows_any(held) is (train or may)


def test_a_greedy_baseline_is_a_request_more() -> None:
    tree = {"name": "a job", "output": "/out", "model": {"path": "/model"}, "data": {"files": ["train.parquet"]}}
    for name, more in (("grpo", 0), ("remax", 1)):
        spec = parse({**tree, "algorithm": {"advantage": {"name": name}}})
        terms, samples = LeaseTerms.of(spec), spec.rollout.samples_per_prompt
        assert (terms.requests(Purpose.TRAIN), terms.samples[Purpose.TRAIN]) == (samples + more, samples)
        assert terms.requests(Purpose.EVALUATION) == terms.samples[Purpose.EVALUATION]
        assert training_sampling(spec).greedy_baseline is bool(more)


class Desk:
    """A queue over a real store, with one member that holds version 0."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.fleet = Fleet(store, Patience(1.0, 5.0))
        self.partition = Partition(self.fleet)
        self.queue = Queue(store, self.partition, Events(store), PrometheusMetrics())
        self.queue.running_job = RunningJob(weights(0), 0, TERMS, evaluated=Version(0))

    async def member(self, name: str = "rollout-a", port: int = 1) -> Member:
        await self.fleet.register(registration(name, port=port))
        member = self.fleet.member(name)
        await self.partition.configured(member, Configured(JOB.id, 1, "float32"))
        await self.partition.hold(weights(0), member)
        return member

    async def issue(self, count: int, purpose: Purpose = Purpose.TRAIN) -> None:
        prefix = "e" if purpose is Purpose.EVALUATION else ""
        drafts = [queued(f"{prefix}0-{n}", purpose) for n in range(count)]
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


def test_an_empty_queue_is_asked_for_once_by_all_members(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    lease = prompts.Prompts.lease

    async def counted(self: prompts.Prompts, member: MemberId, *arguments: Any) -> list[prompts.Claim] | None:
        asked.append(member)
        return await lease(self, member, *arguments)

    async def scenario(desk: Desk) -> None:
        names = [f"rollout-{n}" for n in range(5)]
        for port, name in enumerate(names):
            await desk.member(name, port + 1)
        monkeypatch.setattr(prompts.Prompts, "lease", counted)
        for name in names:
            assert await desk.lease(4, name=name) == [] and desk.reason == "the queue is empty"
        assert asked == ["rollout-0"] * len(Purpose)
        await desk.issue(1)
        assert await desk.lease(4, name="rollout-4") == ["0-0"]

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


def test_members_that_had_too_little_room_look_again_when_they_have_more(redis_url: str) -> None:
    """Each waits as the other asks anew: neither is behind the other."""

    async def scenario(desk: Desk) -> None:
        for number, name in enumerate(("rollout-a", "rollout-b")):
            member = await desk.member(name, port=1 + number)
            member.pulse = dataclasses.replace(member.pulse, running=3)
        await desk.issue(2)
        first = asyncio.create_task(desk.lease(1, 0.2, "rollout-a"))
        second = asyncio.create_task(desk.lease(1, 0.6, "rollout-b"))
        assert await first == []
        again = asyncio.create_task(desk.lease(4, 5.0, "rollout-a"))
        assert await second == []
        assert len(await desk.lease(4, 5.0, "rollout-b")) == len(await again) == 1

    at_the_desk(redis_url, scenario)


def test_a_draining_member_and_one_without_weights_get_none(redis_url: str) -> None:
    async def scenario(desk: Desk) -> None:
        member = await desk.member()
        await desk.issue(1)
        member.weights = None
        assert await desk.lease(8) == [] and "no verified weights" in desk.reason
        await desk.partition.hold(weights(0), member)
        await desk.fleet.drain(member.id)
        assert await desk.lease(8, wait_s=5.0) == [] and "drains" in desk.reason
        with pytest.raises(NotFound, match="rollout-z is not in the fleet"):
            await desk.lease(8, name="rollout-z")
        desk.queue.running_job = None
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
        await desk.partition.hold(weights(0), member)
        desk.fleet.bell.ring()
        assert await asyncio.wait_for(waiting, 10.0) == ["0-1"]

    at_the_desk(redis_url, scenario)


@pytest.mark.parametrize(
    ("free", "prompts", "taken"),
    [
        ([16, 16, 16], 6, [2, 2, 2]),
        ([16, 16, 16], 4, [2, 1, 1]),
        ([4, 12], 4, [1, 3]),
        ([4, 16], 1, [0, 1]),
        ([16, 16], 40, [4, 4]),
        ([16] * 20, 40, [2] * 20),
    ],
)
def test_replicas_that_wait_share_the_prompts_by_their_free_slots(
    redis_url: str, free: list[int], prompts: int, taken: list[int]
) -> None:
    """Each asks again at once for what it has left, as a replica does. Nothing that fits stays in the queue."""

    async def scenario(desk: Desk) -> None:
        members = [await desk.member(f"rollout-{number}", number + 1) for number in range(len(free))]
        got = [0] * len(free)

        async def pull(number: int) -> None:
            while (left := free[number] - 4 * got[number]) > 0:
                leases, _ = await desk.queue.lease(members[number].id, left, 60.0)
                got[number] += len(leases)

        pulling = [asyncio.create_task(pull(number)) for number in range(len(free))]
        await until(lambda: asyncio.sleep(0, len(desk.queue._line._free)), lambda waiting: waiting == len(free))
        await desk.issue(prompts)
        await until(lambda: asyncio.sleep(0, sum(got)), lambda all_of_them: all_of_them == sum(taken))
        assert sorted(got) == sorted(taken) and (free[0] == free[-1] or got == taken)
        for task in pulling:
            task.cancel()
        await asyncio.gather(*pulling, return_exceptions=True)
        assert not desk.queue._line._free and not desk.queue._line._claiming

    at_the_desk(redis_url, scenario)


def test_a_member_that_no_longer_waits_has_no_share(redis_url: str) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.member()
        await desk.member("rollout-b", 2)
        assert await desk.lease(16, wait_s=0.05, name="rollout-b") == []
        await desk.issue(4)
        assert await desk.lease(16) == ["0-0", "0-1", "0-2", "0-3"]

    at_the_desk(redis_url, scenario)


def test_what_a_lost_member_held_goes_to_others(redis_url: str) -> None:
    async def scenario(desk: Desk) -> None:
        first, _ = await desk.member(), await desk.member("rollout-b", 2)
        await desk.issue(2)
        (lease, _), _ = await desk.queue.lease(first.id, 8, 0.0)
        ref = LeaseRef.of(lease.ref)
        epoch = desk.fleet.epoch
        await desk.fleet.leave(first.id, "")
        assert desk.fleet.epoch == epoch + 1
        assert await desk.lease(8, name="rollout-b") == ["0-0", "0-1"]
        with pytest.raises(Fenced, match=r"lease \S+ with fence 1 is over"):
            await desk.queue.refuse(first.id, JOB.id, ref, Drop(DropReason.REWARD_FAILED, "late"))

    at_the_desk(redis_url, scenario)


def test_an_answer_is_taken_once(redis_url: str) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.member()
        await desk.issue(1)
        (lease,), _ = await desk.queue.lease(MemberId("rollout-a"), 8, 0.0)
        ref = LeaseRef.of(lease.ref)
        for _ in range(2):
            await desk.queue.refuse(
                MemberId("rollout-a"), JOB.id, ref, Drop(DropReason.PROMPT_TOO_LONG, "9 > 8 tokens")
            )
        view = await desk.store.prompts(JOB.id).view()
        assert (view.dropped, view.reasons) == (1, {DropReason.PROMPT_TOO_LONG: 1})

    at_the_desk(redis_url, scenario)


@contextlib.asynccontextmanager
async def expiring(desk: Desk, lease_s: float, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(queue, "EXPIRE_EVERY_S", 0.05)
    desk.queue.running_job = RunningJob(weights(0), 0, dataclasses.replace(TERMS, lease_s=lease_s))
    task = asyncio.create_task(desk.queue.expire())
    try:
        yield
    finally:
        task.cancel()


@pytest.mark.slow
def test_leases_that_nobody_could_extend_have_their_time_again(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator was away for longer than a lease lasts, then the replica extends it."""

    async def scenario(desk: Desk) -> None:
        member = await desk.member()
        await desk.issue(1)
        (lease,), _ = await desk.queue.lease(member.id, 8, 0.0)
        ref = LeaseRef.of(lease.ref)
        await asyncio.sleep(3.1)
        async with expiring(desk, 3.0, monkeypatch):
            await asyncio.sleep(0.5)
            extended = time.monotonic()
            assert (await desk.queue.extend(member.id, JOB.id, [ref]))[0] == set()
            await asyncio.sleep(2.7)  # past the time that it had before
            held = await desk.queue.held()
            assert held == {member.id: 1} or time.monotonic() - extended >= 3.0
            await until(desk.queue.held, lambda held: not held, 60.0)

    at_the_desk(redis_url, scenario)


def test_a_member_that_died_while_the_coordinator_was_away_keeps_nothing(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(desk: Desk) -> None:
        member = await desk.member()
        await desk.issue(1)
        assert await desk.lease(8) == ["0-0"]
        async with expiring(desk, 60.0, monkeypatch):
            await desk.fleet.leave(member.id, "")
            assert await desk.queue.held() == {}

    at_the_desk(redis_url, scenario)


@pytest.mark.slow
def test_a_redis_that_stood_still_expires_nothing_at_once(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        member, redis = await desk.member(), desk.store.connection
        monkeypatch.setattr(connection, "TIMEOUT_S", 0.3)
        monkeypatch.setattr(prompts, "TIMEOUT_S", 0.3)
        pid = int((await redis.do("INFO", "server"))["process_id"])
        await desk.issue(1)
        async with expiring(desk, 2.0, monkeypatch):
            await asyncio.sleep(2.2)
            (lease,), _ = await desk.queue.lease(member.id, 8, 0.0)
            ref = LeaseRef.of(lease.ref)
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(2.5)
            finally:
                os.kill(pid, signal.SIGCONT)
            await redis.wait_until_up()
            await asyncio.sleep(0.2)
            assert (await desk.queue.extend(member.id, JOB.id, [ref]))[0] == set()
            await until(desk.queue.held, lambda held: not held, 60.0)

    at_the_desk(redis_url, scenario)


def test_leases_are_not_expired_later_than_asked(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Redis that stood still comes to what it was asked before."""

    async def scenario(desk: Desk) -> None:
        await desk.member()
        await desk.issue(1)
        assert await desk.lease(8) == ["0-0"]
        run, expire = desk.store.connection.run, desk.store.prompts(JOB.id).expire

        async def run_late(*arguments: Any) -> Any:
            await asyncio.sleep(0.3)
            return await run(*arguments)

        monkeypatch.setattr(prompts, "TIMEOUT_S", 0.2)
        with monkeypatch.context() as late:
            late.setattr(desk.store.connection, "run", run_late)
            assert await expire(0.1) == []
        assert await expire(0.1) == ["0-0"]

    at_the_desk(redis_url, scenario)


def part(version: int, tokens: int = 1, start: int = 0) -> work_pb2.Part:
    spans = [common_pb2.VersionSpan(version=version, start=0, end=tokens)]
    return work_pb2.Part(start=start, tokens=bytes(4 * tokens), logprobs=bytes(4 * tokens), versions=spans)


def serialized(*parts: work_pb2.Part) -> bytes:
    return work_pb2.LeaseParts(parts=parts).SerializeToString()


def test_a_lease_goes_on_with_what_its_holders_have_told(redis_url: str) -> None:
    async def scenario(desk: Desk) -> None:
        a, b = await desk.member(), await desk.member("rollout-b", port=2)
        await desk.issue(2)
        one, two = (LeaseRef.of(lease.ref) for lease in (await desk.queue.lease(a.id, 8, 0.0))[0])
        assert (await desk.queue.extend(a.id, JOB.id, [one, two], {one: serialized(part(0, 2))}))[0] == set()
        assert (await desk.queue.extend(a.id, JOB.id, [one], {one: serialized(part(0, 3, start=2))}))[0] == set()
        await desk.queue.release(a.id, JOB.id, [one, two], {one: serialized(part(0, 1, start=5)), two: b"\xff"})
        # Whoever has lost the lease changes nothing.
        assert (await desk.queue.extend(a.id, JOB.id, [one], {one: serialized(part(0, 9))}))[0] == {one}
        first, second = (await desk.queue.lease(b.id, 8, 0.0))[0]
        assert [len(p.tokens) // 4 for p in first.parts] == [6] and not second.parts
        again = LeaseRef.of(first.ref)
        await desk.queue.extend(b.id, JOB.id, [again], {again: serialized(part(0, 1, start=6))})
        await desk.queue.take_back(b, "silence")
        assert [len(p.tokens) // 4 for p in (await desk.queue.lease(a.id, 4, 0.0))[0][0].parts] == [7]

    at_the_desk(redis_url, scenario)


@pytest.mark.parametrize("end", ["refuse", "rewind", "close"])
def test_parts_go_with_what_they_belong_to(redis_url: str, end: str) -> None:
    async def scenario(desk: Desk) -> None:
        a, prompts = await desk.member(), desk.store.prompts(JOB.id)
        await desk.issue(1)
        ref = LeaseRef.of((await desk.queue.lease(a.id, 4, 0.0))[0][0].ref)
        await desk.queue.extend(a.id, JOB.id, [ref], {ref: serialized(part(0))})
        kept = {key for key in await desk.store.connection.do("KEYS", "*:parts*")}
        assert len(kept) == 2
        if end == "refuse":
            await desk.queue.refuse(a.id, JOB.id, ref, Drop(DropReason.BAD_PROMPT, ""))
        elif end == "rewind":
            await prompts.rewind(0)
        else:
            await prompts.close(1, DropReason.JOB_FAILED)
        assert await desk.store.connection.do("KEYS", "*:parts*") == []

    at_the_desk(redis_url, scenario)


def test_parts_too_stale_to_be_trained_are_not_continued() -> None:
    job = RunningJob(weights(5), max_staleness=1, terms=TERMS)
    old, good, new = part(3), part(4), part(5)
    assert job.usable([old, good, new], Purpose.TRAIN) == [good, new]
    for version, usable in ((5, [new]), (4, [good]), (None, [])):
        job = dataclasses.replace(job, evaluated=version and Version(version))
        assert job.usable([old, good, new], Purpose.EVALUATION) == usable

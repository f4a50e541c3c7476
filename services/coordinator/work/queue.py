"""Leases: which replica works on which prompt, until when. Replicas pull work; nobody pushes it."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from millrace import events
from millrace.contracts.v1 import common_pb2, work_pb2
from millrace.drops import Drop, DropReason
from millrace.errors import InvalidState, NotFound
from millrace.ids import JobId, MemberId, PromptId, Purpose
from millrace.rest.fleet import DEFAULT_PARTITION
from millrace.spec.pool import ROLLOUT
from millrace.telemetry.spans.context import TraceContext
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import RECORDER
from services.coordinator.fleet.fleet import Fleet
from services.coordinator.fleet.partition import Partition
from services.coordinator.observe.events import Events
from services.coordinator.observe.groups import samples_of
from services.coordinator.observe.prometheus import PrometheusMetrics
from services.coordinator.state.bell import Bell
from services.coordinator.state.faults import PROMPT_BUDGET
from services.coordinator.state.group import GroupSummary, fault
from services.coordinator.state.job import ENDED
from services.coordinator.state.lease import LeaseRef
from services.coordinator.state.member import Member
from services.coordinator.store import Prompts, Store
from services.coordinator.store.prompts import NO_PARTS
from services.coordinator.work.line import Line
from services.coordinator.work.terms import BEHIND, EMPTY, LeaseTerms, Offer, RunningJob

LONGEST_WAIT_S = 30.0
EXPIRE_EVERY_S = 1.0


class Queue:
    """Gives leases of a partition's job to its members, and takes their answers."""

    def __init__(self, store: Store, partition: Partition, events: Events, prometheus: PrometheusMetrics) -> None:
        self.running_job: RunningJob | None = None
        """None while no job runs. The job loop sets it at every new version."""
        self.issued = Bell()
        """Rings when there may be something to lease."""
        self.answered = Bell()
        """Rings when a lease was answered."""
        self._store = store
        self.partition = partition
        self._events = events
        self._prometheus = prometheus
        self._closing = False
        self._line = Line(self._may_look)
        for bell in (self.issued, partition.bell):
            bell.on_ring(self._line.ring)
        partition.on_drain(lambda member: self._line.wake(member.id))
        partition.on_gone(self.take_back, handed_over=True)

    def place(self) -> tuple[JobId, int] | None:
        """The running job and the step in progress; None while no job runs."""
        job = self.running_job
        return None if job is None else (job.weights.job_id, job.weights.version + 1)

    # Lease.

    async def lease(self, member_id: MemberId, free_samples: int, wait_s: float) -> tuple[list[work_pb2.Lease], str]:
        """Leases for as many samples as the member can start, or the reason why there are none. Members that wait at
        the same time share the open prompts by their free slots. Waits for leases up to `wait_s`. Raises NotFound if
        the caller is not a member, InvalidState once it was handed over to another partition."""
        deadline = time.monotonic() + min(wait_s, LONGEST_WAIT_S)
        rings, offer = self._line.rings, BEHIND
        if wait_s <= 0 or not self._line.is_served:
            offer = await self._offer(self.partition.member(member_id), free_samples)
        if offer.exhausted:
            self._line.found_nothing(rings)
        while not offer.leases and not self._closing and not self.partition.member(member_id).draining:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not await self._line.wait(member_id, rings, left_s, free_samples):
                break
            rings, exhausted = self._line.rings, False
            try:
                offer = await self._offer(self.partition.member(member_id), free_samples)
                exhausted = offer.exhausted
            finally:
                self._line.looked(rings, found=bool(offer.leases), exhausted=exhausted)
        return offer.leases, offer.idle_reason

    def _may_look(self, member_id: MemberId) -> bool:
        """Whether to answer a member that waits: it could get leases, or it is not a member here any more."""
        job = self.running_job
        try:
            return job is not None and not _why_idle(job, self.partition.member(member_id))
        except (NotFound, InvalidState):
            return True

    async def _offer(self, member: Member, free_samples: int) -> Offer:
        """What the member can lease now."""
        job = self.running_job
        if job is None:
            return Offer([], "no job runs")
        if reason := _why_idle(job, member):
            return Offer([], reason)
        if self._line.is_empty:
            return EMPTY
        async with self._line.turn(member.id, free_samples) as share:
            offer = await self._claimed(job, member, free_samples, share)
            if offer.leases:
                self._line.served(member.id)
            return offer

    async def _claimed(self, job: RunningJob, member: Member, free_samples: int, share: float) -> Offer:
        leases: list[work_pb2.Lease] = []
        exhausted = True
        for purpose in job.terms.purposes:
            if not job.allows(member.weights, purpose):
                exhausted = False
                continue
            samples = job.terms.requests(purpose)
            count = free_samples // samples
            if count == 0 and not leases and await self._runs_nothing(member):
                count = 1
            exhausted = exhausted and count > 0
            prompts = self._prompts(job.weights.job_id, purpose)
            claims = await prompts.lease(member.id, count, job.weights.lineage, share)
            if claims is None:
                return Offer(leases, f"{member.id} works on a prompt that other replicas died with, and on no other")
            for claim in claims:
                lease = claim.row.lease
                lease.ref.CopyFrom(claim.ref.message(job.weights.job_id))
                lease.expires_s = job.terms.lease_s
                lease.parts.extend(job.usable(claim.sampled(), purpose))
                _record_queue(job.weights.job_id, lease)
                leases.append(lease)
                free_samples -= samples
        self._prometheus.leased(job.weights.job_id, len(leases))
        return Offer(leases, "") if leases else replace(EMPTY, exhausted=exhausted)

    def close(self) -> None:
        """Makes every later request for leases return at once."""
        self._closing = True
        self._line.wake_all()

    async def _runs_nothing(self, member: Member) -> bool:
        if member.pulse.running + member.pulse.waiting or (job := self.running_job) is None:
            return False
        for purpose in Purpose:
            if await self._prompts(job.weights.job_id, purpose).holds_any(member.id):
                return False
        return True

    # Answers.

    async def extend(
        self,
        member_id: MemberId,
        job_id: JobId,
        leases: Sequence[LeaseRef],
        parts: Mapping[LeaseRef, bytes] = NO_PARTS,
    ) -> tuple[set[LeaseRef], float]:
        """Restarts the deadlines, and keeps serialized parts; answers the leases that the member has lost, and for how
        long it has the others."""
        terms = await self._terms(job_id)
        lost: set[LeaseRef] = set()
        for purpose, some in _by_purpose(leases).items():
            lost |= await self._prompts(job_id, purpose).extend(member_id, some, parts)
        return lost, terms.lease_s

    async def complete(self, member_id: MemberId, job_id: JobId, lease: LeaseRef, group: common_pb2.Group) -> None:
        """Stores the group of a lease. A group that cannot be trained is dropped. Raises Fenced, InvalidState."""
        purpose, terms = lease.purpose, await self._terms(job_id)
        group.member_id = group.member_id or member_id
        if drop := fault(group, terms.wanted(purpose)):
            await self.refuse(member_id, job_id, lease, drop)
            shown = sorted(samples_of(group, await self._next_step(job_id)), key=lambda each: not each.reward_failure)
            await self._store.records(job_id).add_samples(shown[:1])
            return
        summary = replace(GroupSummary.of(group, terms.reward_parts), completed_s=time.time(), entry=lease.id)
        new = await self._prompts(job_id, purpose).complete(lease, group.SerializeToString(), summary)
        if new:
            self._prometheus.completed(job_id, group)
        self._line.wake(member_id)  # it may have been held back until now
        self.answered.ring()

    async def refuse(self, member_id: MemberId, job_id: JobId, lease: LeaseRef, drop: Drop) -> None:
        """Drops the prompt of a lease: there is no group. Raises Fenced."""
        step = await self._next_step(job_id)
        if await self._prompts(job_id, lease.purpose).refuse(lease, step, drop):
            dropped = events.PromptDropped(reason=drop.reason, lease=lease.id, member=member_id)
            await self._events.add(job_id, dropped, str(drop)[:500])
        self._line.wake(member_id)
        self.answered.ring()

    async def release(
        self,
        member_id: MemberId,
        job_id: JobId,
        leases: Sequence[LeaseRef],
        parts: Mapping[LeaseRef, bytes] = NO_PARTS,
    ) -> None:
        """Ends leases unanswered: their prompts are leased again at once, with their serialized parts."""
        for purpose, some in _by_purpose(leases).items():
            await self._prompts(job_id, purpose).release(some, parts)
        self.issued.ring()

    async def held(self) -> dict[MemberId, int]:
        """Number of leases of the running job that each member holds."""
        held: Counter[MemberId] = Counter()
        if job := self.running_job:
            for purpose in Purpose:
                held.update(await self._prompts(job.weights.job_id, purpose).held())
        return dict(held)

    # Leases that end without an answer.

    async def take_back(self, member: Member, why: str) -> None:
        """Ends all leases of the member: their prompts are leased to others."""
        self._line.wake(member.id)
        if (job := self.running_job) is None:
            return
        job_id, step = job.weights.job_id, job.weights.version + 1
        died = f"{PROMPT_BUDGET} replicas died while they worked on it; the last one: {why}" if member.died else ""
        prompts: list[PromptId] = []
        for purpose in Purpose:
            queued, dropped = await self._prompts(job_id, purpose).take_back(member.id, step, died)
            prompts += queued
            for prompt in dropped:
                reason = DropReason.KILLED_REPLICAS
                event = events.PromptDropped(reason=reason, prompt=prompt, member=member.id)
                await self._events.add(job_id, event, str(Drop(reason, died))[:500])
        self.issued.ring()
        self.answered.ring()
        message = f"{member.id} is out of service ({why}); {len(prompts)} leases go to others"
        await self._events.add(job_id, events.MemberOut(member=member.id, prompts=prompts[:50]), message)

    async def expire(self) -> None:
        """Ends leases that were not extended in time, until cancelled. After a time in which none could be extended,
        before this coordinator started or while Redis was down, every lease has its whole time again."""
        begun = math.inf
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            async with self._store.connection.outlasted():
                if job := self.running_job:
                    begun, now = min(begun, time.monotonic()), time.monotonic()
                    if now - max(begun, self._store.connection.up_since) >= job.terms.lease_s:
                        await self._expire_now(job)

    async def _expire_now(self, job: RunningJob) -> None:
        job_id = job.weights.job_id
        for purpose in Purpose:
            if prompts := await self._prompts(job_id, purpose).expire(job.terms.lease_s):
                self.issued.ring()
                self._prometheus.expired(job_id, len(prompts))
                message = f"{len(prompts)} leases were not extended within {job.terms.lease_s:g} s"
                await self._events.add(job_id, events.LeaseExpired(prompts=prompts[:50]), message)

    def _prompts(self, job_id: JobId, purpose: Purpose) -> Prompts:
        return self._store.prompts(job_id, purpose)

    async def _terms(self, job_id: JobId) -> LeaseTerms:
        """The lease terms of a job. Answers are also taken while its loop starts again after a restart. Raises NotFound
        if there is no such job or it has ended."""
        if self.running_job is not None and self.running_job.weights.job_id == job_id:
            return self.running_job.terms
        job = await self._store.jobs.get(job_id)
        if job.state in ENDED:
            raise NotFound(f"{job_id} has ended: it is {job.state}.", "drop the work for it.")
        return LeaseTerms.of(job.spec)

    async def _next_step(self, job_id: JobId) -> int:
        """The step to be trained next."""
        if self.running_job is not None and self.running_job.weights.job_id == job_id:
            return self.running_job.weights.version + 1
        return (await self._store.jobs.get(job_id)).step + 1


class Queues:
    """The queues of all partitions. A member gets leases from that of its partition; its answers go to that of the job,
    which may have ended: then what the store holds says whether they count."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._queues: dict[str, Queue] = {}

    def add(self, partition: str, queue: Queue) -> None:
        self._queues[partition] = queue

    def of_member(self, member_id: MemberId) -> Queue:
        """Raises NotFound if the caller is not a member."""
        return self._queues[self._fleet.member(member_id).partition]

    def of_job(self, job_id: JobId) -> Queue:
        """The queue of the partition that runs the job; if none does, that of the default one."""
        running = (queue for queue in self._queues.values() if (at := queue.place()) is not None and at[0] == job_id)
        return next(running, self._queues[DEFAULT_PARTITION])

    def place(self, partition: str) -> tuple[JobId, int] | None:
        """The job and the step of a partition, see `Queue.place`; None if there is no such partition."""
        return self._queues[partition].place() if partition in self._queues else None

    async def held(self) -> dict[MemberId, int]:
        """Number of leases of running jobs that each member holds."""
        return {member: count for queue in self._queues.values() for member, count in (await queue.held()).items()}

    def close(self) -> None:
        """Makes every later request for leases return at once."""
        for queue in self._queues.values():
            queue.close()


def _why_idle(job: RunningJob, member: Member) -> str:
    """Why the member gets no leases; empty if it may have some."""
    if member.draining:
        return f"{member.id} drains"
    if member.pool != ROLLOUT:
        return f"{member.id} is of the pool {member.pool}, which generates nothing"
    if not job.allows_any(member.weights):
        held = f"version {member.weights.version}" if member.weights else "no verified weights"
        return f"{member.id} holds {held}, the job is at version {job.weights.version}"
    return ""


def _record_queue(job_id: JobId, lease: work_pb2.Lease) -> None:
    """Records how long the prompt of a new lease was in the queue."""
    root = TraceContext.parse(lease.traceparent, job_id=job_id, group=lease.prompt_id)
    if lease.issued_s:
        RECORDER.past(SpanKind.QUEUE, root, lease.issued_s, time.time(), figures={"claim": float(lease.ref.fence)})


def _by_purpose(leases: Sequence[LeaseRef]) -> dict[Purpose, list[LeaseRef]]:
    parts: dict[Purpose, list[LeaseRef]] = {}
    for lease in leases:
        parts.setdefault(lease.purpose, []).append(lease)
    return parts

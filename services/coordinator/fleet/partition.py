"""The members of one partition of the fleet: those that work for its job, and no others."""

import time
from collections.abc import Callable
from dataclasses import replace

from millrace.errors import InvalidState
from millrace.ids import Epoch, JobId
from millrace.rest import MemberKind
from millrace.rest.fleet import DEFAULT_PARTITION
from millrace.spec.pool import ROLLOUT
from services.coordinator.fleet.fleet import Fleet, Gone
from services.coordinator.state.bell import waited
from services.coordinator.state.member import Configured, Member, Unconfigured, Weights

LONGEST_WAIT_S = 30.0
"""Longest wait for the replicas of a pool."""


class Partition:
    """What the job of a partition sees of the fleet. A member belongs to one partition at a time.

    The epoch is that of the whole fleet. It orders publications of one job and is compared with nothing else, so that
    changes in other partitions only leave gaps; and a job that runs in another partition later finds no lower one."""

    def __init__(self, fleet: Fleet, name: str = DEFAULT_PARTITION) -> None:
        self.name = name
        self._fleet = fleet
        self.bell = fleet.bell
        """Rings at every change of the fleet."""
        self.patience = fleet.patience
        self.call, self.cut, self.suspect, self.grow = fleet.call, fleet.cut, fleet.suspect, fleet.grow
        self.on_last_words = fleet.on_last_words
        """For members of all partitions: a dead one is in none any more."""

    @property
    def epoch(self) -> Epoch:
        return self._fleet.epoch

    @property
    def deadlines(self) -> dict[str, float]:
        """Deadlines of calls to the members, in seconds by method. The job of the partition sets them."""
        return self._fleet.deadlines(self.name)

    def on_gone(self, call: Gone, *, handed_over: bool = False) -> None:
        """`call` is called for members of this partition that are gone, see `Fleet.on_gone`; with `handed_over` also
        for members that it handed over and that may still hold leases of its job."""

        async def told(member: Member, why: str) -> None:
            if self.has(member) or (handed_over and member.came_from == self.name):
                await call(member, why)

        self._fleet.on_gone(told)

    def on_drain(self, call: Callable[[Member], None]) -> None:
        """`call` is called for members of this partition that drain, see `Fleet.on_drain`."""
        self._fleet.on_drain(lambda member: call(member) if self.has(member) else None)

    # Reading, and calling members.

    def has(self, member: Member) -> bool:
        return member.partition == self.name

    def member(self, member_id: str) -> Member:
        """The member with this id. Raises NotFound if it is gone, InvalidState if it is of another partition."""
        member = self._fleet.member(member_id)
        if not self.has(member):
            what = f"{member_id} is of the partition {member.partition}, not of {self.name}."
            raise InvalidState(what, "ask again: a replica that names no partition can be handed over.")
        return member

    @property
    def trainer(self) -> Member | None:
        """The trainer that registered first. Other trainers wait until it is gone."""
        return next(iter(self._trainers()), None)

    @property
    def standbys(self) -> list[Member]:
        """The trainers that wait for the seat, those first that registered first."""
        return self._trainers()[1:]

    def _trainers(self) -> list[Member]:
        return [m for m in self._fleet.of_kind(MemberKind.TRAINER) if self.has(m) and not m.draining]

    @property
    def replicas(self) -> list[Member]:
        """Replicas that generate and are not draining."""
        return self.pool(ROLLOUT)

    def pool(self, name: str) -> list[Member]:
        """The replicas of a pool that are not draining."""
        wanted = (self.name, name, False)
        return [m for m in self._fleet.of_kind(MemberKind.ROLLOUT) if (m.partition, m.pool, m.draining) == wanted]

    async def find_pool(self, name: str, job_id: JobId, wait_s: float) -> list[Member]:
        """The replicas of a pool that are ready for a job. Waits up to `wait_s` while there are none."""
        deadline = time.monotonic() + min(wait_s, LONGEST_WAIT_S)
        while True:
            ring, ready = self.bell.next(), [m for m in self.pool(name) if m.ready_for(job_id)]
            if ready or not await waited(ring, deadline - time.monotonic()):
                return ready

    def ready_for(self, job_id: JobId) -> list[Member]:
        """Replicas that are configured for the job."""
        return [m for m in self.replicas if m.ready_for(job_id)]

    # What becomes of members.

    async def recall(self, job_id: JobId, spec: str) -> None:
        """Replicas that were configured for the job with another spec have to be configured again."""
        for member in [m for m in self._fleet.of_kind(MemberKind.ROLLOUT) if self.has(m) and m.ready_for(job_id)]:
            if member.configured is not None and member.configured.spec != spec:
                member.weights = member.configured = None
                await self._fleet.keep(member)

    async def configured(self, member: Member, configured: Configured) -> None:
        """The member's engine is ready for a job. It has no weights yet."""
        member.configured, member.weights, member.failures, member.unconfigured = configured, None, 0, None
        member.came_from = ""
        await self._fleet.keep(member)
        self.bell.ring()

    async def refused(self, member: Member, refusal: Unconfigured) -> None:
        """The member refused a job as invalid. It has left the job before, and can be configured for another one."""
        member.configured, member.weights, member.unconfigured = None, None, refusal
        if not member.gone.is_set():
            await self._fleet.keep(member)

    async def hold(self, weights: Weights, *members: Member) -> None:
        """The members have verified these weights and serve them."""
        for member in members:
            member.weights, member.weights_at, member.failures = weights, time.monotonic(), 0
        await self._fleet.keep(*members)

    async def hold_base(self, *members: Member) -> None:
        """The members have verified the base of their job's adapter. They do not serve it alone."""
        for member in members:
            if member.configured is not None:
                member.configured = replace(member.configured, has_base=True)
        await self._fleet.keep(*members)

"""The members of one partition of the fleet: those that work for its job, and no others; and the trainer that is in
charge there: one trainer, one call at a time."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from millrace.contracts.method import Request, Response, Unary
from millrace.contracts.methods import TrainerRpc
from millrace.contracts.v1 import trainer_pb2
from millrace.errors import Fenced, InvalidState, Unavailable
from millrace.ids import Epoch, JobId, Version
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


LAST_CALLS = {method.key for method in (TrainerRpc.GetStatus, TrainerRpc.Save, TrainerRpc.FinishSave)}
"""Calls that a trainer gets while it drains: a checkpoint of what it holds."""


class TrainerLost(Unavailable):
    """The trainer is gone, was replaced, or holds another version than the ledger says. The job loop starts again and
    finds out what the trainer holds."""


class TrainerLeft(TrainerLost):
    """The trainer was asked to leave: it drains, or has left. That is nobody's failure."""

    def __init__(self, member: Member) -> None:
        super().__init__(f"{member.id} was asked to leave.", "start another trainer.")
        self.member = member.id


class Trainer:
    """Calls the trainer that was in charge at the last `take`, and no other."""

    def __init__(self, fleet: Partition) -> None:
        self.turn = asyncio.Lock()
        """Held while the trainer steps, publishes, saves or loads, and until the ledger knows of it."""
        self._fleet = fleet
        self._taken: Member | None = None
        self._held: tuple[Member, JobId, Version] | None = None

    def take(self) -> None:
        """Chooses the trainer that is in charge now. Calls go to it alone, until `take` is called again. Raises
        TrainerLost if there is none."""
        self._taken = None
        self._taken = self.member
        self._taken.trains = True

    def release(self) -> None:
        """The job has ended: calls go to whichever trainer is in charge."""
        if self._taken is not None:
            self._taken.trains = False
        self._taken = self._held = None

    @property
    def holds(self) -> tuple[JobId, Version] | None:
        """Job and version that the trainer certainly holds. None while that is not known, as for a new trainer."""
        if self._held is None or self._held[0] is not self._fleet.trainer:
            return None
        return self._held[1:]

    @holds.setter
    def holds(self, held: tuple[JobId, Version] | None) -> None:
        self._held = (self._taken or self.member, *held) if held is not None else None

    @property
    def member(self) -> Member:
        """The trainer in charge. Raises TrainerLost if there is none, or another one than at the last `take`."""
        self.check_stays()
        member = self._fleet.trainer
        if member is None:
            raise TrainerLost("there is no trainer in the fleet.", "start one.")
        if self._taken is not None and member is not self._taken:
            raise TrainerLost(f"{member.id} is the trainer now, in place of {self._taken.id}.")
        return member

    def check(self, needed: bool) -> None:
        """Raises TrainerLeft if the trainer was asked to leave, TrainerLost if another one has taken over, or if it is
        gone and `needed`."""
        self.check_stays()
        if self._fleet.trainer is None and not needed:
            return
        member = self.member
        if self._held is None or self._held[0] is not member:
            raise TrainerLost("another trainer has taken over.")

    def check_stays(self) -> None:
        """Raises TrainerLeft if the trainer of the last `take` was asked to leave."""
        if self._taken is not None and self._taken.leaves:
            raise TrainerLeft(self._taken)

    async def call(self, method: Unary[Request, Response], request: Request) -> Response:
        """Calls the trainer. Raises TrainerLost if it cannot be reached or holds another job or version; TrainerLeft if
        it drains or has left: one that drains is only asked for what `LAST_CALLS` has."""
        drains = self._taken is not None and self._taken.draining and method.key in LAST_CALLS
        member = self._taken if self._taken is not None and drains else self.member
        try:
            return await self._fleet.call(member, method, request)
        except (Unavailable, Fenced) as error:
            self._held = None
            await self._fleet.suspect(member)
            if member.leaves:
                raise TrainerLeft(member) from error
            raise TrainerLost(error.what, error.fix) from error

    async def status(self) -> trainer_pb2.TrainerStatus:
        return await self.call(TrainerRpc.GetStatus, trainer_pb2.TrainerStatusRequest())

"""The pull loop: leases as many prompts as the engine has room for, extends the leases, answers them.

Nobody pushes work to a replica. Work on a lease that was lost is stopped in the engine. An answer is repeated until the
coordinator has taken it, so that a restart of the coordinator loses no group.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import structlog

from millrace.contracts.methods import WorkRpc
from millrace.contracts.v1 import common_pb2, work_pb2
from millrace.drops import Drop, DropReason
from millrace.errors import Fenced, InvalidState, MillraceError, NotFound, Unavailable
from millrace.ids import MemberId
from millrace.telemetry.spans.context import TraceContext
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import RECORDER
from millrace.wire.channel import Peer
from millrace.wire.enums import drop_message
from millrace.wire.server import LARGEST_GROUP_BYTES
from services.rollout.engine import Completion, Engine, EngineDied
from services.rollout.episode.admission import Admission
from services.rollout.episode.slots import Slots
from services.rollout.user_process.pool import NoProcessLeft
from services.rollout.work.groups import GroupGenerator, prefixes, reported, unreported

DECREASE = 0.8
"""Part of the slots that is left after a preemption."""


@dataclass
class Concurrency:
    """The slots of an engine that may be used. An engine whose cache is full preempts a request and computes it again
    later, from its beginning. Then fewer slots are used, and one more each time that all of them have ended without a
    preemption (additive increase, multiplicative decrease)."""

    capacity: int
    """Slots of the engine."""
    preempted: int = 0
    """Requests that the engine had preempted when it was last looked at, counted since it started."""
    _slots: float = field(init=False)
    _in_effect: bool = field(default=True, init=False)
    """Whether no more episodes than `slots` have generated at some time since the last decrease."""

    def __post_init__(self) -> None:
        self._slots = float(self.capacity)

    @property
    def slots(self) -> int:
        """Episodes that may generate at the same time, from 1 to `capacity`."""
        return int(self._slots)

    def look(self, preempted: int, generating: int) -> None:
        """Takes the number of requests that the engine has preempted since it started, and of episodes that have a slot
        now."""
        self._in_effect = self._in_effect or generating <= self.slots
        # While more generate than the last decrease allows, a preemption says nothing of that decrease.
        if preempted > self.preempted and self._in_effect:
            self._slots = max(1.0, min(self._slots, generating) * DECREASE)
            self._in_effect = generating <= self.slots
        self.preempted = preempted

    def ended(self) -> None:
        """A sample has ended."""
        self._slots = min(float(self.capacity), self._slots + 1.0 / max(1.0, self._slots))


log = structlog.get_logger(__name__)
WAIT_S = 25.0
"""How long a request for leases waits at the coordinator when there are none."""
RETRY_S = 1.0
ANSWER_ATTEMPTS = 600
"""About 20 minutes of a coordinator that cannot be reached."""
PARTS_BYTES = 16 << 20
"""Size of the parts of leases after which a message to the coordinator is full."""
ENVELOPE_BYTES = 4096
"""More than a message that answers a lease has besides its group."""
Key = tuple[str, "common_pb2.Purpose", str]
"""Identity of a lease, whatever its fence: job, purpose, lease id."""


@dataclass
class HeldLease:
    """A lease that is being worked on."""

    lease: work_pb2.Lease
    task: asyncio.Task[None]
    expires_s: float
    """Seconds for which the last extension holds."""
    slots: Slots
    """What its episodes take of the engine."""


class Leases:
    """The leases that this replica holds. `run` works until it is cancelled."""

    def __init__(self, coordinator: Peer, member_id: MemberId, *, admit_by_cache: bool = True) -> None:
        """`admit_by_cache`: whether episodes of several turns wait while the engine's cache has no room for them."""
        self.generated_tokens = 0
        """Response tokens since the process started."""
        self.on_forgotten: Callable[[], None] = lambda: None
        """Called when the coordinator does not know this member."""
        self.on_death: Callable[[EngineDied], None] = lambda _: None
        """Called when the engine has died."""
        self.on_job_lost: Callable[[NoProcessLeft], None] = lambda _: None
        """Called when nothing can be scored, or no episode played, for the job any more."""
        self.coordinator = coordinator
        self._member_id = member_id
        self._held: dict[Key, HeldLease] = {}
        self._generator: GroupGenerator | None = None
        self._concurrency = Concurrency(0)
        """The slots of the generator's engine that may be used."""
        self._admit_by_cache = admit_by_cache
        self.admission = Admission()
        """Says which of the generator's episodes go on."""
        self._changed = asyncio.Event()
        self._extend_soon = asyncio.Event()
        self._reported_first = 0
        """Index of the lease whose parts are the first in the next extension."""
        self._not_asking = asyncio.Event()
        self._not_asking.set()

    @property
    def held(self) -> int:
        """Number of leases that are being worked on."""
        return len(self._held)

    @property
    def asking(self) -> bool:
        """Whether a request for leases is on its way."""
        return not self._not_asking.is_set()

    @property
    def slots(self) -> int:
        """Slots of the engine that are used; fewer than it has if its cache is too small. 0 before the first job."""
        return self._concurrency.slots

    def serve(self, generator: GroupGenerator | None) -> None:
        """Generates groups with `generator` from now on. With None no more leases are taken; work in progress
        continues."""
        if generator is not None and generator is not self._generator:
            self._concurrency = Concurrency(generator.engine.capacity, _preempted(generator.engine))
            self.admission = Admission(generator.episode_limit() if self._admit_by_cache else None)
        self._generator = generator
        self._changed.set()

    async def run(self) -> None:
        """Pulls and extends leases until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pull())
            tasks.create_task(self._extend())

    async def finish(self) -> None:
        """Waits until no lease is held any more, and none can come: a request may have been granted just before
        `serve(None)`."""
        while self._held or self.asking:
            await self._not_asking.wait()
            if self._held:
                await asyncio.wait([held.task for held in self._held.values()])

    async def release(self, reason: str) -> None:
        """Stops all work in progress and returns the leases with what they have got, so that they are issued again at
        once."""
        held = list(self._held.values())
        parts = [_unreported(one.lease, one.slots) for one in held]
        for one in held:
            one.task.cancel(reason)
        if not held:
            return
        await asyncio.wait([one.task for one in held])
        log.info("leases returned", count=len(held), reason=reason)
        for some in _in_batches(parts):
            await self._return(some)

    # Pulling.

    async def _pull(self) -> None:
        while True:
            generator, free = await self._room()
            self._not_asking.clear()
            try:
                answered = await self._ask(generator, free)
            finally:
                self._not_asking.set()
            if not answered:
                await asyncio.sleep(RETRY_S)

    async def _ask(self, generator: GroupGenerator, free: int) -> bool:
        """Asks for leases for `free` samples, and takes them. False if the coordinator gave no answer:
        ask again later."""
        request = work_pb2.LeaseRequest(member_id=self._member_id, free_samples=free, wait_s=WAIT_S)
        try:
            reply = await self.coordinator.call(WorkRpc.Lease, request)
        except NotFound:
            self.on_forgotten()
            return False
        except MillraceError as error:
            log.info("no leases", error=str(error))
            return False
        for lease in reply.leases:
            self._take(lease, generator)
        return True

    async def _room(self) -> tuple[GroupGenerator, int]:
        """Waits until the engine has a free slot, then answers for how many samples to ask: one free slot is room for
        a whole group, whose other samples wait in the engine so that no slot stays empty. Episodes that wait for a tool
        have no slot, so any number of groups may be open; the limit of `admission` bounds them."""
        while True:
            self._changed.clear()
            if self._generator is not None:
                generator, group = self._generator, self._generator.job.spec.rollout.samples_per_prompt
                held = [each.slots for each in self._held.values()]
                free = self._concurrency.slots - sum(slots.generating for slots in held)
                if (most := self.admission.limit or generator.most_episodes) is not None:
                    free = min(free, most - sum(slots.open for slots in held))
                # Groups that wait for their scores hold no slot. Without a bound a slow reward would fill the memory.
                scoring = sum(not slots.open for slots in held)
                if free > 0 and scoring < 2 * generator.engine.capacity:
                    return generator, free + group - 1
            await self._changed.wait()

    def _take(self, lease: work_pb2.Lease, generator: GroupGenerator) -> None:
        key = _key(lease.ref)
        held = self._held.get(key)
        if held is not None:  # this replica's own lease expired and it claimed it again: the older fence is refused
            held.task.cancel("claimed again")
        episodes, known = lease.sampling.samples + lease.sampling.greedy_baseline, prefixes(lease.parts)
        slots = Slots(episodes, self._slots_changed, self._on_completion, self.admission, known)
        del lease.parts[:]
        task = asyncio.create_task(self._work(lease, generator, slots), name=f"lease {lease.ref.lease_id}")
        self._held[key] = HeldLease(lease, task, lease.expires_s, slots)
        self._extend_soon.set()
        task.add_done_callback(lambda done: self._done(key, done))

    # Working.

    def _on_completion(self, completion: Completion) -> None:
        self.generated_tokens += len(completion.tokens) - completion.carried
        self._concurrency.ended()

    def _slots_changed(self) -> None:
        if self._generator is not None:
            generating = sum(held.slots.generating for held in self._held.values())
            self._concurrency.look(_preempted(self._generator.engine), generating)
        self._changed.set()

    async def _work(self, lease: work_pb2.Lease, generator: GroupGenerator, slots: Slots) -> None:
        if self._generator is not generator or lease.ref.job_id != generator.job.id:
            # Every change of job leaves some leases that were granted just before it.
            log.info("lease returned", prompt=lease.prompt_id, reason="the replica takes no more work for this job")
            await self._return([_unreported(lease, slots)])
            return
        root = TraceContext.parse(lease.traceparent, job_id=lease.ref.job_id, group=lease.prompt_id)
        with RECORDER.span(SpanKind.LEASE, parent=root) as holding:
            holding.figures |= {"samples": float(lease.sampling.samples), "capacity": float(generator.engine.capacity)}
            try:
                answer = await generator.answer(lease, time.monotonic(), slots)
            except EngineDied as error:
                self.on_death(error)
                return
            except MillraceError as error:
                if isinstance(error, NoProcessLeft):
                    self.on_job_lost(error)
                log.warning("lease returned", prompt=lease.prompt_id, reason=str(error))
                await self._return([_unreported(lease, slots)])
                return
            await self._answer(lease, answer)

    async def _answer(self, lease: work_pb2.Lease, answer: common_pb2.Group | Drop) -> None:
        request = work_pb2.CompleteRequest(member_id=self._member_id, ref=lease.ref)
        if isinstance(answer, common_pb2.Group):
            answer = _fitting(answer)
        if isinstance(answer, Drop):
            request.drop.CopyFrom(drop_message(answer))
            log.info("prompt dropped", prompt=lease.prompt_id, reason=answer.reason, detail=answer.detail)
        else:
            request.group.CopyFrom(answer)
        try:
            with RECORDER.span(SpanKind.COMPLETE):
                await self.coordinator.call(WorkRpc.Complete, request, attempts=ANSWER_ATTEMPTS)
        except (Fenced, NotFound, InvalidState) as error:
            log.info("answer refused", prompt=lease.prompt_id, error=str(error))
        except MillraceError as error:
            log.error("answer lost; the lease expires and the prompt is issued again", error=str(error))

    async def _return(self, leases: Sequence[work_pb2.LeaseParts]) -> None:
        """Returns leases unanswered, with what they have got."""
        refs, parts = [one.ref for one in leases], [one for one in leases if one.parts]
        request = work_pb2.ReleaseRequest(member_id=self._member_id, leases=refs, parts=parts)
        try:
            await self.coordinator.call(WorkRpc.Release, request, attempts=3)
        except MillraceError as error:
            log.warning("leases could not be returned; they expire", count=len(leases), error=str(error))

    def _done(self, key: Key, task: asyncio.Task[None]) -> None:
        held = self._held.get(key)
        if held is not None and held.task is task:
            del self._held[key]
        self._changed.set()
        if task.cancelled() or (error := task.exception()) is None:
            return
        # A bug that this prompt triggered. The replica continues with the others, and the prompt is not issued again.
        log.error("a prompt failed", lease=key[2], exc_info=error)
        if held is not None:
            drop = Drop(DropReason.REPLICA_FAILED, f"{type(error).__name__}: {error}")
            self._extend_soon.set()
            failed = asyncio.create_task(self._answer(held.lease, drop))
            self._held[key] = HeldLease(held.lease, failed, held.expires_s, Slots(0))
            failed.add_done_callback(lambda _: self._held.pop(key, None))

    # Extending.

    async def _extend(self) -> None:
        """Extends all leases, each time after a third of the shortest remaining time."""
        while True:
            self._extend_soon.clear()
            life_s = min((held.expires_s for held in self._held.values()), default=None)
            if life_s is None:
                await self._extend_soon.wait()
                continue
            await asyncio.sleep(life_s / 3)
            held = list(self._held.values())
            if not held:
                continue
            # What does not fit is sent with the next extension: then it comes first.
            self._reported_first = (self._reported_first + 1) % len(held)
            turned = held[self._reported_first :] + held[: self._reported_first]
            parts = next(_in_batches(_unreported(one.lease, one.slots) for one in turned))
            refs = [one.lease.ref for one in held]
            try:
                request = work_pb2.ExtendRequest(member_id=self._member_id, leases=refs)
                request.parts.extend(one for one in parts if one.parts)
                reply = await self.coordinator.call(WorkRpc.Extend, request)
            except NotFound:
                self.on_forgotten()
            except Unavailable as error:
                log.info("leases not extended", error=str(error))
            except MillraceError as error:
                log.warning("leases not extended", error=str(error))
            else:
                for one, part in zip(turned, parts, strict=False):
                    reported(one.slots.responses, part.parts)
                self._extended(reply)

    def _extended(self, reply: work_pb2.ExtendResponse) -> None:
        for ref in reply.lost:
            held = self._held.get(_key(ref))
            if held is not None and held.lease.ref.fence == ref.fence:
                log.info("lease lost", prompt=held.lease.prompt_id)
                held.task.cancel("the lease was lost")
        if reply.expires_s > 0:
            for held in self._held.values():
                held.expires_s = reply.expires_s


def _unreported(lease: work_pb2.Lease, slots: Slots) -> work_pb2.LeaseParts:
    return work_pb2.LeaseParts(ref=lease.ref, parts=unreported(slots.responses))


def _in_batches(parts: Iterable[work_pb2.LeaseParts]) -> Iterator[list[work_pb2.LeaseParts]]:
    """The parts of leases, divided so that each batch but for its last lease has less than PARTS_BYTES."""
    batch, size = list[work_pb2.LeaseParts](), 0
    for one in parts:
        batch.append(one)
        size += one.ByteSize()
        if size >= PARTS_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _preempted(engine: Engine) -> int:
    """Requests that the engine has preempted since it started, as far as it reports them."""
    stats = engine.stats()
    return 0 if stats is None else stats.preempted


def _fitting(group: common_pb2.Group) -> common_pb2.Group | Drop:
    """The group, or why it cannot be sent. Generating it again would bring another one as large."""
    if (size := group.ByteSize()) <= LARGEST_GROUP_BYTES - ENVELOPE_BYTES:
        return group
    what = f"{size / 2**20:.0f} MiB, at most {LARGEST_GROUP_BYTES / 2**20:.0f} MiB can be sent."
    fix = "Fix: lower rollout.samples_per_prompt or rollout.max_response_tokens, or replay no expert routing."
    return Drop(DropReason.GROUP_TOO_LARGE, f"{what} {fix}")


def _key(ref: work_pb2.LeaseRef) -> Key:
    return ref.job_id, ref.purpose, ref.lease_id

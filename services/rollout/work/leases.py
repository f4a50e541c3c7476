"""The pull loop: leases as many prompts as the engine has room for, keeps the leases alive, answers them.

Nobody pushes work. A lease that was lost is stopped in the engine; an answer is repeated until the coordinator has
taken it, so that a coordinator that restarts costs nothing.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from millrace.errors import Fenced, InvalidState, MillraceError, NotFound, Unavailable
from millrace.ids import MemberId
from millrace.wire.channel import Peer
from millrace.wire.methods import WorkRpc
from millrace.wire.v1 import common_pb2, work_pb2
from services.rollout.engine import EngineDied, Sample
from services.rollout.work.groups import Bench, Dropped

log = structlog.get_logger(__name__)
WAIT_S = 10.0
"""How long a request for leases waits at the coordinator when there are none."""
RETRY_S = 1.0
ANSWER_ATTEMPTS = 600
"""About 20 minutes of a coordinator that cannot be reached."""


@dataclass
class Held:
    """A lease in work."""

    lease: work_pb2.Lease
    task: asyncio.Task[None]
    expires_s: float
    sampling: int
    """Samples that have not ended."""


class Leases:
    def __init__(self, coordinator: Peer, member_id: MemberId) -> None:
        self.generated_tokens = 0
        """Response tokens since the process started."""
        self.on_forgotten: Callable[[], None] = lambda: None
        """Called when the coordinator does not know this member."""
        self.on_death: Callable[[EngineDied], None] = lambda _: None
        """Called when the engine ended by itself."""
        self._coordinator = coordinator
        self._member_id = member_id
        self._held: dict[tuple[str, str], Held] = {}
        self._bench: Bench | None = None
        self._changed = asyncio.Event()
        self._extend_soon = asyncio.Event()

    def serve(self, bench: Bench | None) -> None:
        """Makes groups with `bench` from now on; None takes no more leases. What is in work goes on."""
        self._bench = bench
        self._changed.set()

    async def run(self) -> None:
        """Pulls and works, without end."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pull())
            tasks.create_task(self._extend())

    async def finish(self) -> None:
        """Returns once nothing is in work."""
        while self._held:
            await asyncio.wait([held.task for held in self._held.values()])

    async def release(self, reason: str) -> None:
        """Stops everything in work and gives the leases back, to be issued again at once."""
        held = list(self._held.values())
        for one in held:
            one.task.cancel(reason)
        if not held:
            return
        await asyncio.wait([one.task for one in held])
        log.info("leases given back", count=len(held), reason=reason)
        request = work_pb2.ReleaseRequest(member_id=self._member_id, leases=[one.lease.ref for one in held])
        try:
            await self._coordinator.call(WorkRpc.Release, request, attempts=3)
        except MillraceError as error:
            log.warning("leases could not be given back; they expire", count=len(held), error=str(error))

    # Pulling.

    async def _pull(self) -> None:
        while True:
            bench, free = await self._room()
            request = work_pb2.LeaseRequest(member_id=self._member_id, free_samples=free, wait_s=WAIT_S)
            try:
                reply = await self._coordinator.call(WorkRpc.Lease, request)
            except NotFound:
                self.on_forgotten()
                await asyncio.sleep(RETRY_S)
                continue
            except MillraceError as error:
                log.info("no leases", error=str(error))
                await asyncio.sleep(RETRY_S)
                continue
            for lease in reply.leases:
                self._take(lease, bench)

    async def _room(self) -> tuple[Bench, int]:
        """Waits until the engine has a slot free, then answers how many samples to ask for: with one slot free there
        is room for a whole group, whose rest waits in the engine so that no slot stays empty."""
        while True:
            self._changed.clear()
            if self._bench is not None:
                bench, group = self._bench, self._bench.job.spec.rollout.samples_per_prompt
                free = bench.engine.capacity - sum(held.sampling for held in self._held.values())
                # Groups that wait for their scores hold no slot; without a bound a slow scorer would fill the memory.
                if free > 0 and len(self._held) < 2 * bench.engine.capacity:
                    return bench, free + group - 1
            await self._changed.wait()

    def _take(self, lease: work_pb2.Lease, bench: Bench) -> None:
        key = (lease.ref.job_id, lease.ref.lease_id)
        held = self._held.get(key)
        if held is not None:  # our own lease, expired and claimed by us again: the older fence answers nothing any more
            held.task.cancel("claimed again")
        task = asyncio.create_task(self._work(lease, bench), name=f"lease {lease.ref.lease_id}")
        self._held[key] = Held(lease, task, lease.expires_s, lease.sampling.samples + lease.sampling.greedy_baseline)
        self._extend_soon.set()
        task.add_done_callback(lambda done: self._done(key, done))

    # Working.

    async def _work(self, lease: work_pb2.Lease, bench: Bench) -> None:
        if self._bench is not bench or lease.ref.job_id != bench.job.id:
            await self._give_back(lease, "the replica serves something else now")
            return
        key = (lease.ref.job_id, lease.ref.lease_id)

        def sampled(sample: Sample) -> None:
            self.generated_tokens += len(sample.tokens)
            self._held[key].sampling -= 1
            self._changed.set()

        try:
            answer = await bench.answer(lease, time.monotonic(), sampled)
        except EngineDied as error:
            self.on_death(error)
            return
        except MillraceError as error:
            await self._give_back(lease, str(error))
            return
        await self._answer(lease, answer)

    async def _answer(self, lease: work_pb2.Lease, answer: common_pb2.Group | Dropped) -> None:
        request = work_pb2.CompleteRequest(member_id=self._member_id, ref=lease.ref)
        if isinstance(answer, Dropped):
            request.dropped = answer.reason
            log.info("prompt dropped", prompt=lease.prompt_id, reason=answer.reason)
        else:
            request.group.CopyFrom(answer)
        try:
            await self._coordinator.call(WorkRpc.Complete, request, attempts=ANSWER_ATTEMPTS)
        except (Fenced, NotFound, InvalidState) as error:
            log.info("answer refused", prompt=lease.prompt_id, error=str(error))
        except MillraceError as error:
            log.error("answer lost; the lease expires and the prompt is issued again", error=str(error))

    async def _give_back(self, lease: work_pb2.Lease, reason: str) -> None:
        log.warning("lease given back", prompt=lease.prompt_id, reason=reason)
        request = work_pb2.ReleaseRequest(member_id=self._member_id, leases=[lease.ref])
        try:
            await self._coordinator.call(WorkRpc.Release, request, attempts=3)
        except MillraceError as error:
            log.warning("the lease expires instead", prompt=lease.prompt_id, error=str(error))

    def _done(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        held = self._held.get(key)
        if held is not None and held.task is task:
            del self._held[key]
        self._changed.set()
        if task.cancelled() or (error := task.exception()) is None:
            return
        # A defect that this prompt brought to light: it must not take the others along, nor come back for ever.
        log.error("a prompt failed", lease=key[1], exc_info=error)
        if held is not None:
            reason = f"replica: {type(error).__name__}: {error}"
            self._extend_soon.set()
            failed = asyncio.create_task(self._answer(held.lease, Dropped(reason)))
            self._held[key] = Held(held.lease, failed, held.expires_s, 0)
            failed.add_done_callback(lambda _: self._held.pop(key, None))

    # Keeping.

    async def _extend(self) -> None:
        """Moves the deadlines of all leases, at a third of the shortest life."""
        while True:
            self._extend_soon.clear()
            life_s = min((held.expires_s for held in self._held.values()), default=None)
            if life_s is None:
                await self._extend_soon.wait()
                continue
            await asyncio.sleep(life_s / 3)
            refs = [held.lease.ref for held in self._held.values()]
            if not refs:
                continue
            try:
                request = work_pb2.ExtendRequest(member_id=self._member_id, leases=refs)
                reply = await self._coordinator.call(WorkRpc.Extend, request)
            except NotFound:
                self.on_forgotten()
            except Unavailable as error:
                log.info("leases not extended", error=str(error))
            except MillraceError as error:
                log.warning("leases not extended", error=str(error))
            else:
                self._extended(reply)

    def _extended(self, reply: work_pb2.ExtendResponse) -> None:
        for ref in reply.lost:
            held = self._held.get((ref.job_id, ref.lease_id))
            if held is not None and held.lease.ref.fence == ref.fence:
                log.info("lease lost", prompt=held.lease.prompt_id)
                held.task.cancel("the lease was lost")
        if reply.expires_s > 0:
            for held in self._held.values():
                held.expires_s = reply.expires_s

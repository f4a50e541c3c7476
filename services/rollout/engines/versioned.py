"""An engine whose weights change by version: what all engines share. Publications go through it phase by phase."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, TypeVarTuple

from millrace.contracts.v1 import weights_pb2
from millrace.errors import InvalidState
from millrace.ids import Version
from millrace.spec.rollout import CachePolicy
from millrace.weights.loader.misfits import tensors_untaken
from millrace.weights.plans.boxes import Boxes
from millrace.weights.plans.manifest import Manifest
from services.rollout.engine import NO_TOKENS, Completion, EngineDied, EngineStats, Load, Response, Sampling
from services.rollout.engines.endings import Endings
from services.rollout.weights.engine_weights import CommitReport
from services.rollout.weights.transfer_request import TransferRequest, nothing_prepared
from services.rollout.weights.worker_methods import Placed, Prepared, Received, Sent, WorkerMethods
from services.rollout.weights.worker_rpc import WorkerDied, Workers


@dataclass(eq=False)
class Ticket:
    """A sample in the engine."""

    came_at: float
    began_at: float | None = None

    @property
    def waited_s(self) -> float:
        """Seconds without a slot so far."""
        return (time.monotonic() if self.began_at is None else self.began_at) - self.came_at


class Slots:
    """Follows the samples in an engine: each has a slot as soon as fewer than `capacity()` before it have one. An
    engine that lacks memory for as many lets samples wait longer than this says."""

    def __init__(self, capacity: Callable[[], int]) -> None:
        self._capacity = capacity
        self._inside: dict[Ticket, None] = {}
        """The samples in the engine, in the order in which they came."""
        self._period_from: float | None = None
        self._busy_s = 0.0
        """Seconds of the period in which samples were in the engine, without those that are in it now."""
        self._busy_from = 0.0

    def enter(self) -> Ticket:
        """A sample begins."""
        ticket = Ticket(time.monotonic())
        if not self._inside:
            self._busy_from = ticket.came_at
        self._inside[ticket] = None
        self._give()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """The sample has ended."""
        if ticket.began_at is None:
            ticket.began_at = time.monotonic()
        del self._inside[ticket]
        if not self._inside:
            self._busy_s += time.monotonic() - self._busy_from
        self._give()

    def next_period(self) -> float | None:
        """Begins a period. Returns the share of the period before in which no sample was in the engine, 0 to 1; None if
        there was none."""
        now, began, busy_s = time.monotonic(), self._period_from, self._busy_s
        if self._inside:
            busy_s += now - self._busy_from
        self._period_from, self._busy_from, self._busy_s = now, now, 0.0
        return None if began is None or began >= now else 1.0 - busy_s / (now - began)

    def end_period(self) -> None:
        """Ends the period without one after it."""
        self._period_from = None

    def _give(self) -> None:
        """Gives free slots to the first that have none."""
        for number, ticket in enumerate(self._inside):
            if number >= self._capacity():
                return
            if ticket.began_at is None:
                ticket.began_at = time.monotonic()


Arguments = TypeVarTuple("Arguments")
Answer = TypeVar("Answer")


@dataclass(frozen=True, eq=False)
class Incoming:
    """A transfer that was prepared in every worker."""

    request: TransferRequest
    shadow: bool
    """It is received in spare memory; otherwise it is put in place as it arrives, while generation is paused."""


class VersionedEngine(ABC):
    """Implements `EngineWeights` by calls into the workers, and `generate` around it. A subclass says how its engine
    reaches its workers, pauses, and ends requests."""

    _workers: Workers
    """Valid once the engine has started, as is `_endings`."""
    _endings: Endings
    capacity = 0

    def __init__(self) -> None:
        self._running: set[str] = set()
        """Requests in flight."""
        self._slots = Slots(lambda: self.capacity)
        self._replays = False
        """Whether the experts of routers are reported."""
        self._version: Version | None = None
        """The version in place; None if there is none."""
        self._dropped = 0
        """How often the version was dropped. Requests that ran then are refused when they end."""
        self._weight_changes = 0
        """Counts every weight change. Version numbers repeat after a rewind and from job to job, so they cannot key the
        cache of keys and values."""
        self._may_begin = asyncio.Event()
        """Set unless a publication pauses generation. Requests that come during a pause begin after it."""
        self._may_begin.set()
        self._incoming: Incoming | None = None
        self._known_plan = b""
        """Hash of the plan that the workers know."""
        self._cache_block = 0
        """Tokens of a block of the cache of prefixes; 0 if the engine keeps none, or does not tell."""
        self._half_written = False
        """Generation is paused for a transfer that is put in place as it arrives."""
        self._pause_ordered_s = self._pause_answered_s = 0.0
        """When the last pause was ordered, and when the engine said that it stands still (time.perf_counter())."""

    @abstractmethod
    async def _generate(self, prompt_tokens: Sequence[int], sampling: Sampling, response: Response) -> Completion:
        """`generate`, with a version in place when it begins, and a prefix that is no whole response."""

    @abstractmethod
    def _started(self) -> bool:
        """Whether there are workers to ask."""

    @abstractmethod
    async def _pause(self, cache_policy: CachePolicy) -> None:
        """Stops generation, or changes the cache policy of the pause that it is in. Requests in flight stay, with their
        keys and values, or to be prefilled again."""

    @abstractmethod
    async def _resume(self) -> None:
        """Ends the pause, if there is one."""

    def _last_token_s(self) -> float:
        """When the last token before the pause arrived (time.perf_counter()), as precisely as the engine reports it."""
        return self._pause_answered_s

    @abstractmethod
    async def _label(self, version: Version, cache_key: str) -> None:
        """Tokens that are sampled from now on are of `version`. Requests that begin from now on find only keys and
        values of `cache_key`. Called while generation is paused."""

    @abstractmethod
    async def _end_requests(self) -> None:
        """Ends all requests in flight."""

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: Sampling, response: Response | None = None
    ) -> Completion:
        """See `Engine`. Raises InvalidState if no version is in place, or none was at some time until the sample
        ended."""
        self.load()
        await self._may_begin.wait()
        self.load()
        if self._version is None:
            raise InvalidState("no version is in place.", "the prompt is issued again.")
        response = response or Response()
        if self._replays and len(response.prefix) and response.prefix.experts is None:
            # No expert has seen the last token, which may have ended the response: a pass over the others finds theirs.
            response.shorten(len(response.prefix) - 1)
        prefix = response.prefix
        if len(prefix) and (whole := self._endings.whole(len(prompt_tokens), prefix, sampling)) is not None:
            return whole
        dropped, ticket = self._dropped, self._slots.enter()
        try:
            completion = await self._generate(prompt_tokens, sampling, response)
        finally:
            self._slots.leave(ticket)
            response.follow(NO_TOKENS.after)
        if self._dropped != dropped:
            raise InvalidState("no version was in place for a while.", "the prompt is issued again.")
        response.follow(completion.partial.after(completion.carried).after)
        return replace(completion, waited_s=ticket.waited_s)

    def load(self) -> Load:
        """See `Engine`."""
        running = min(len(self._running), self.capacity)
        return Load(running, len(self._running) - running)

    def stats(self) -> EngineStats | None:
        """See `Engine`."""
        return None

    async def finish_batch(self) -> None:
        """See `Engine`."""
        await self._ask(WorkerMethods.finish_batch)

    async def describe(self, manifest: Manifest) -> Sequence[Boxes]:
        answers = await self._ask(WorkerMethods.describe, manifest.to_proto().SerializeToString())
        if nowhere := set.intersection(*(set(answer.untaken) for answer in answers)):
            raise tensors_untaken([manifest.tensors[i].name for i in sorted(nowhere)])
        return [Boxes.decode(answer.boxes) for answer in answers]

    async def hosts(self) -> Sequence[str]:
        return await self._ask(WorkerMethods.host)

    async def checksums(self) -> list[dict[str, int]]:
        """The checksum of each parameter by name, for every worker: to compare what engines hold."""
        return await self._ask(WorkerMethods.checksums)

    async def prepare_receive(self, request: TransferRequest) -> None:
        if self.half_written:
            await self.abort_receive()  # otherwise the workers forget an unfinished transfer by themselves
        known = bool(request.plan_hash) and request.plan_hash == self._known_plan
        answers = await self._ask(WorkerMethods.prepare, request.encode(whole=not known))
        if None in answers:
            answers = await self._ask(WorkerMethods.prepare, request.encode())
        self._known_plan = request.plan_hash
        shadow = in_shadow(request, [answer for answer in answers if answer is not None])
        await self._ask(WorkerMethods.make_ready, shadow)
        self._incoming = Incoming(request, shadow)

    async def begin_receive(self) -> None:
        if (incoming := self._incoming) is None:
            raise nothing_prepared()
        if incoming.shadow:
            await self._ask(WorkerMethods.begin)
            return
        await self._enter_pause("keep")
        if self._incoming is not incoming:  # aborted while generation came to its pause: nothing was written yet
            await self._leave_pause()
            raise nothing_prepared()
        self._half_written = True
        await self._ask(WorkerMethods.begin, paused=True)

    @property
    def generates_while_receiving(self) -> bool:
        return self._incoming is not None and self._incoming.shadow

    @property
    def half_written(self) -> bool:
        return self._half_written

    async def received(self) -> Received:
        return Received.of_all(await self._ask_until_done(WorkerMethods.wait_received))

    async def commit(self, version: Version | None, cache_policy: CachePolicy) -> CommitReport:
        """See `EngineWeights`. From here on an abort does not end the pause."""
        incoming, self._incoming, self._half_written = self._incoming, None, False
        served, idle = False, None
        try:
            if incoming is None:
                raise nothing_prepared()
            await self._enter_pause(cache_policy)
            placed = Placed.of_all(await self._ask(WorkerMethods.place, paused=True))
            if placed.unplaced:
                raise tensors_untaken(placed.unplaced)
            if version is not None:
                self._weight_changes += 1
                await self._label(version, _cache_key(version, self._weight_changes))
                self._version = version
                served, idle = True, self._slots.next_period()
        finally:
            if not served:
                await self._drop_version()
            stopped = max(self._pause_ordered_s, self._last_token_s())
            await self._leave_pause()
        mode = weights_pb2.COMMIT_MODE_SHADOW if incoming.shadow else weights_pb2.COMMIT_MODE_INPLACE
        return CommitReport(placed, time.perf_counter() - stopped, mode, idle)

    async def abort_receive(self) -> None:
        self._incoming = None
        if self._started():
            await self._ask(WorkerMethods.abort)
            if self._half_written:
                self._half_written = False
                await self._drop_version()
                await self._leave_pause()

    async def prepare_send(self, request: TransferRequest, served: str) -> bytes:
        return b"".join(await self._ask(WorkerMethods.prepare_send, request.encode(), served))

    async def send(self, request: TransferRequest) -> Sent:
        await self._ask(WorkerMethods.send, request.encode())
        return Sent.of_all(await self._ask_until_done(WorkerMethods.wait_sent))

    async def end_send(self) -> None:
        if self._started():
            await self._ask(WorkerMethods.end_send)

    async def _ask(
        self, method: Callable[[Any, *Arguments], Answer], *arguments: *Arguments, paused: bool = False
    ) -> list[Answer]:
        """Every worker's answer: see `Workers.ask`. Raises EngineDied if a worker is gone."""
        try:
            return await self._workers.ask(method, *arguments, paused=paused)
        except WorkerDied as error:
            raise EngineDied(error.what, error.fix) from error

    async def _ask_until_done(self, method: Callable[[Any], Answer | None]) -> list[Answer]:
        """Asks until every worker answers something. Each worker waits a moment before it answers None."""
        while True:
            answers = await self._ask(method)
            done = [answer for answer in answers if answer is not None]
            if len(done) == len(answers):
                return done

    async def _enter_pause(self, cache_policy: CachePolicy) -> None:
        """Pauses, or changes the cache policy of the pause that it is in."""
        first = self._may_begin.is_set()
        if first:
            self._pause_ordered_s = time.perf_counter()
        self._may_begin.clear()
        try:
            await self._pause(cache_policy)
        except BaseException:
            self._may_begin.set()
            raise
        if first:
            self._pause_answered_s = time.perf_counter()

    async def _leave_pause(self) -> None:
        try:
            await self._resume()
        finally:
            self._may_begin.set()

    async def forget_job(self) -> None:
        """See `Engine`."""
        await self._drop_version()
        try:
            await self._enter_pause("recompute")  # which empties the library's caches
        finally:
            await self._leave_pause()

    @property
    def _cache_key(self) -> str:
        """Names the keys and values of the weights in place; weights that were in place before had other names."""
        return _cache_key(self._version, self._weight_changes)

    async def _drop_version(self) -> None:
        """Records that no version is in place: samples in flight are of no use."""
        self._version = None
        self._slots.end_period()
        self._dropped += 1
        self._weight_changes += 1
        await self._end_requests()


def in_shadow(request: TransferRequest, workers: Sequence[Prepared]) -> bool:
    """Whether a transfer is received in spare memory: as it asks, or else if the memory of every worker allows
    it; always if it cannot be put in place as it arrives."""
    if not all(worker.inplace_possible for worker in workers):
        return True
    if request.mode == weights_pb2.COMMIT_MODE_UNSPECIFIED:
        return all(worker.shadow_fits for worker in workers)
    return request.mode == weights_pb2.COMMIT_MODE_SHADOW


def samples_that_fit(requests: int, cache_tokens: int, longest: int) -> int:
    """Samples of at most `longest` tokens that an engine runs at once: at most `requests`, and as many as its cache has
    room for."""
    # A sample in flight has half of its longest length on average.
    return max(1, min(requests, 2 * cache_tokens // longest))


def _cache_key(version: Version | None, weight_changes: int) -> str:
    return f"{version}.{weight_changes}"

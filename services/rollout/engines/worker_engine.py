"""The part of an engine that is the same wherever weights lie in worker processes with a `WeightReceiver` each."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from millrace.errors import InvalidState, PublicationFailed
from millrace.ids import Version
from millrace.spec.rollout import CachePolicy
from millrace.weights.plans.boxes import Boxes
from millrace.weights.plans.manifest import Manifest
from services.rollout.engine import Dispatch, Load, Reception, Sample, Sampling, Swap
from services.rollout.weights.transfer_request import TransferRequest, mode_of, stages

Answers = list[dict[str, Any]]
BETWEEN_BATCHES = frozenset({"millrace_describe", "millrace_apply"})
"""Calls that run the model's own loader: for the thread that generates, whichever way they come."""


class WorkerEngine(ABC):
    """Publications by the phases of `Engine`, and what they touch; how an engine asks its workers, pauses and ends
    requests is its own."""

    capacity = 0

    def __init__(self) -> None:
        self._running: set[str] = set()
        """Requests in flight."""
        self._version: Version | None = None
        self._dropped = 0
        """Versions that were dropped: what ran then is refused when it ends."""
        self._placings = 0
        """Commits and drops: versions alone repeat, when a trainer goes back and from job to job."""
        self._going = asyncio.Event()
        """Not set while a publication has generation stand still: what is asked for then begins after it."""
        self._going.set()
        self._tokenizer: Any = None
        self._transfer_request: TransferRequest | None = None
        self._told = b""
        """The plan that the workers know."""
        self._staged = True
        self._paused = 0.0
        """Since when, for a transfer that is put in place as it comes; 0 otherwise."""

    @abstractmethod
    async def _generate(self, prompt_tokens: Sequence[int], sampling: Sampling) -> Sample:
        """`generate`, with a version in place when it begins."""

    @abstractmethod
    def _started(self) -> bool: ...

    @abstractmethod
    async def _ask(self, method: str, *arguments: Any, paused: bool = False) -> Answers:
        """One call into every worker's receiver, beside generation; once that stands still if `paused`, and between
        two batches for BETWEEN_BATCHES. Raises PublicationFailed for the first that failed."""

    @abstractmethod
    async def _pause(self, cache_policy: CachePolicy) -> None:
        """Keeps requests in flight: with their keys and values, or to be prefilled again."""

    @abstractmethod
    async def _resume(self) -> None: ...

    @abstractmethod
    async def _label(self, version: Version, cache_key: str) -> None:
        """What is sampled from here on is of `version`; what begins here finds only keys and values of `cache_key`."""

    @abstractmethod
    async def _end_requests(self) -> None:
        """Ends all that run."""

    async def generate(self, prompt_tokens: Sequence[int], sampling: Sampling) -> Sample:
        """Raises InvalidState where no version is in place, or at any time until the sample ends was not."""
        self.load()
        await self._going.wait()
        self.load()
        if self._version is None:
            raise InvalidState("no version is in place.", "the prompt is issued again.")
        dropped = self._dropped
        sample = await self._generate(prompt_tokens, sampling)
        if self._dropped != dropped:
            raise InvalidState("no version was in place for a while.", "the prompt is issued again.")
        return sample

    def load(self) -> Load:
        running = min(len(self._running), self.capacity)
        return Load(running, len(self._running) - running)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    async def describe(self, manifest: Manifest) -> Sequence[Boxes]:
        answers = await self._ask("millrace_describe", manifest.to_proto().SerializeToString())
        return [Boxes.decode(answer["boxes"]) for answer in answers]

    async def checksums(self) -> list[dict[str, int]]:
        """Of every parameter, by worker: to compare what lies in engines."""
        return [answer["checksums"] for answer in await self._ask("millrace_checksums")]

    async def prepare(self, transfer_request: TransferRequest) -> None:
        if self.half_written:
            await self.abort_receive()  # otherwise the workers forget by themselves what they had
        known = bool(transfer_request.plan_hash) and transfer_request.plan_hash == self._told
        answers = await self._ask("millrace_prepare", transfer_request.encode(whole=not known))
        if any(answer.get("unknown") for answer in answers):
            answers = await self._ask("millrace_prepare", transfer_request.encode())
        self._told = transfer_request.plan_hash
        if transfer_request.sides is not None:
            self._staged = stages(transfer_request, all(answer["fits"] for answer in answers))
            await self._ask("millrace_ready", self._staged)
        self._transfer_request = transfer_request

    async def begin_receive(self) -> None:
        in_place = self._sharded and not self._staged
        if in_place:
            self._paused = time.perf_counter()
            await self._stand("keep")
            if not self._paused:
                await self._go_on()  # the abort's may have come before the pause
                raise PublicationFailed("the publication was aborted.", "prepare it again.")
        await self._ask("millrace_begin", paused=in_place)

    @property
    def half_written(self) -> bool:
        return bool(self._paused)

    @property
    def _sharded(self) -> bool:
        return self._transfer_request is not None and self._transfer_request.sides is not None

    async def received(self) -> Reception:
        answers = await self._done("millrace_progress")
        wire_s, checksum_s = _slowest(answers, "wire_s"), _slowest(answers, "checksum_s")
        if self._sharded:
            contents = tuple((content, value) for answer in answers for content, value in answer["contents"])
            return Reception((), wire_s=wire_s, checksum_s=checksum_s, contents=contents)
        if any(answer["checksums"] != answers[0]["checksums"] for answer in answers):
            raise PublicationFailed("the engine's workers received different bytes.", "publish again.")
        return Reception(tuple(answers[0]["checksums"]), wire_s=wire_s, checksum_s=checksum_s)

    async def commit(self, version: Version, cache_policy: CachePolicy) -> Swap:
        started, self._paused = self._paused or time.perf_counter(), 0.0  # an abort does not end this pause
        whole = False
        try:
            await self._stand(cache_policy)
            answers = await self._ask("millrace_apply", paused=True)
            _check_placed(answers)
            self._placings += 1
            await self._label(version, _cache_key(version, self._placings))
            self._version = version
            whole = True
        finally:
            if not whole:
                await self._drop_version()
            await self._go_on()
        through_loader = len(self._transfer_request.manifest.tensors) if self._transfer_request else 0
        return Swap(
            apply_s=_slowest(answers, "apply_s"),
            compare_s=_slowest(answers, "compare_s"),
            pause_s=time.perf_counter() - started,
            loader_tensors=max(answer.get("loader_tensors", through_loader) for answer in answers),
            loader_bytes=max(answer.get("loader_bytes", 0) for answer in answers),
            staging_bytes=max(answer.get("staging_bytes", 0) for answer in answers),
            mode=mode_of(self._staged or not self._sharded),
            loader_names=max((tuple(answer.get("loader_names", ())) for answer in answers), key=len),
        )

    async def abort_receive(self) -> None:
        if self._started():
            await self._ask("millrace_abort")
            if self._paused:
                self._paused = 0.0
                await self._drop_version()
                await self._go_on()

    async def prepare_send(self, transfer_request: TransferRequest, served: str) -> bytes:
        answers = await self._ask("millrace_prepare_send", transfer_request.encode(), served)
        return b"".join(answer["nccl_id"] for answer in answers)

    async def send(self, transfer_request: TransferRequest) -> Dispatch:
        await self._ask("millrace_send", transfer_request.encode())
        answers = await self._done("millrace_sent")
        contents = tuple((content, value) for answer in answers for content, value in answer["contents"])
        slots = max(answer["slots"] for answer in answers)
        return Dispatch(contents, _slowest(answers, "pack_s"), _slowest(answers, "sum_s"), slots)

    async def end_send(self) -> None:
        if self._started():
            await self._ask("millrace_end_send")

    async def _done(self, method: str) -> Answers:
        """The answers once every worker says that it is done."""
        while True:  # every worker waits a moment before it answers
            answers = await self._ask(method)
            if all(answer["done"] for answer in answers):
                return answers

    async def _stand(self, cache_policy: CachePolicy) -> None:
        self._going.clear()
        await self._pause(cache_policy)

    async def _go_on(self) -> None:
        try:
            await self._resume()
        finally:
            self._going.set()

    @property
    def _cache_key(self) -> str:
        """Of what lies in place now, and of nothing else that this engine ever had there."""
        return _cache_key(self._version, self._placings)

    async def _drop_version(self) -> None:
        """No version is in place: what runs is of no use."""
        self._version = None
        self._dropped += 1
        self._placings += 1
        await self._end_requests()


def _cache_key(version: Version | None, placings: int) -> str:
    return f"{version}.{placings}"


def raise_failed(answers: Answers) -> Answers:
    """The answers, where no worker failed."""
    for answer in answers:
        if "failed" in answer:
            raise PublicationFailed(answer["failed"], answer["fix"])
    return answers


def samples_that_fit(requests: int, cache_tokens: int, longest: int) -> int:
    """Samples of at most `longest` tokens that an engine runs at once."""
    # One in flight holds half of its longest length on average.
    return max(1, min(requests, 2 * cache_tokens // longest))


def _slowest(answers: Answers, name: str) -> float:
    return max(answer[name] for answer in answers)


def _check_placed(answers: Answers) -> None:
    nowhere = set.intersection(*(set(answer["unplaced"]) for answer in answers))
    if nowhere:
        what = f"the engine's loader placed nothing of {', '.join(sorted(nowhere)[:5])}."
        raise PublicationFailed(what, "leave tied copies out of the manifest; load one model folder everywhere.")

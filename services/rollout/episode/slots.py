"""What an episode has: a slot of the engine while it generates, and a place among the episodes that are open."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from millrace.contracts.v1 import common_pb2
from millrace.telemetry.spans.context import current
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import RECORDER
from services.rollout.engine import NO_TOKENS, Completion, Engine, Partial, Response, Sampling, ShownImages
from services.rollout.episode.admission import Admission, Place, Seen

LEAST_WAIT_S = 0.001
"""A shorter wait for a slot is no span."""


def _nothing() -> None:
    pass


@dataclass
class Slots:
    """The slots of one lease. Every episode has one from the beginning, since it is about to generate."""

    episodes: int
    """Episodes that the lease asks for."""
    on_change: Callable[[], None] = _nothing
    """Called when `open` or `generating` has changed."""
    on_completion: Callable[[Completion], None] = lambda _: None
    """Called with each completion of the engine."""
    admission: Admission = field(default_factory=Admission)
    """Says which of the open episodes go on."""
    prefixes: Mapping[int, Partial] = field(default_factory=dict)
    """What is known already of the answers of the episodes, by their number."""
    responses: dict[int, Response] = field(default_factory=dict)
    """The answers of episodes of one turn that have begun, by the episodes' number."""
    open: int = field(init=False)
    """Episodes that have not ended."""
    generating: int = field(init=False)
    """Episodes that have a slot."""

    def __post_init__(self) -> None:
        self.open = self.generating = self.episodes

    @contextmanager
    def episode(self, number: int = 0) -> Iterator["EpisodeSlot"]:
        """The slot of an episode, counted from 0. It is free when the episode ends."""
        try:
            with self.admission.place() as place:
                yield EpisodeSlot(self, number, place)
        finally:
            self.open -= 1
            self._change(-1)

    def _change(self, generating: int) -> None:
        self.generating += generating
        self.on_change()


@dataclass(frozen=True)
class EpisodeSlot:
    """The slot of one episode."""

    _slots: Slots
    _number: int
    _place: Place

    @property
    def goes_on(self) -> bool:
        """Whether `wait` would return at once."""
        return self._slots.admission.goes_on(self._place)

    async def wait(self) -> None:
        """Waits until the cache has room for the episode: before it begins, or between two turns. To be used inside
        `free`."""
        await self._slots.admission.wait(self._place)

    @contextmanager
    def free(self) -> Iterator[None]:
        """Inside, the episode waits for something else than the engine, and others may have its slot."""
        self._slots._change(-1)
        try:
            yield
        finally:
            self._slots._change(+1)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, the episode generates. To be used inside `free`."""
        self._slots._change(+1)
        try:
            yield
        finally:
            self._slots._change(-1)

    async def answer(
        self, engine: Engine, prompt_tokens: Sequence[int], sampling: Sampling, images: ShownImages | None = None
    ) -> Completion:
        """`generate` for an episode that is this one answer. It is continued if it was begun elsewhere, and can be
        continued elsewhere."""
        response = Response(self._slots.prefixes.get(self._number, NO_TOKENS), images)
        self._slots.responses[self._number] = response
        return await self.generate(engine, prompt_tokens, sampling, response)

    async def generate(
        self,
        engine: Engine,
        prompt_tokens: Sequence[int],
        sampling: Sampling,
        response: Response | None = None,
        seen: Seen | None = None,
    ) -> Completion:
        """One completion of the engine for this episode. `seen`: what the turn before says of its prompt. Records the
        wait for a slot and the generation as spans."""
        began_s, context = time.time(), current()
        if response is None:
            completion = await engine.generate(prompt_tokens, sampling)
        else:
            completion = await engine.generate(prompt_tokens, sampling, response)
        slot_s = began_s + completion.waited_s
        if completion.waited_s > LEAST_WAIT_S:
            RECORDER.past(SpanKind.ENGINE_QUEUE, context, began_s, slot_s)
        tokens = float(len(completion.tokens) - completion.carried)
        RECORDER.past(SpanKind.GENERATE, context, slot_s, time.time(), figures={"tokens": tokens})
        if seen is not None and completion.cached is not None:
            self._slots.admission.turn(self._place, seen, completion.cached)
        self.completed(completion)
        return completion

    def record(self, account: common_pb2.EpisodeAccount) -> None:
        """Enters what the episode has found in the cache, and how long it was held back."""
        place, admission = self._place, self._slots.admission
        account.prefix_tokens, account.cached_prefix_tokens = place.prefix_tokens, place.cached_prefix_tokens
        account.held_back_s, account.open_episodes = place.waited_s, admission.active
        account.episode_limit = admission.limit or 0

    def completed(self, completion: Completion) -> None:
        """Counts a completion of the engine for this episode."""
        self._slots.on_completion(completion)

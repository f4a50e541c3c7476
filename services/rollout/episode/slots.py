"""Slots of the engine: an episode has one while it generates, and none while it waits for its environment."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from millrace.telemetry.spans.context import current
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import RECORDER
from services.rollout.engine import Completion, Engine, Sampling

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
    open: int = field(init=False)
    """Episodes that have not ended."""
    generating: int = field(init=False)
    """Episodes that have a slot."""

    def __post_init__(self) -> None:
        self.open = self.generating = self.episodes

    @contextmanager
    def episode(self) -> Iterator["EpisodeSlot"]:
        """The slot of the next episode. It is free when the episode ends."""
        try:
            yield EpisodeSlot(self)
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

    async def generate(self, engine: Engine, prompt_tokens: Sequence[int], sampling: Sampling) -> Completion:
        """One completion of the engine for this episode. Records the wait for a slot and the generation as spans."""
        began_s, context = time.time(), current()
        completion = await engine.generate(prompt_tokens, sampling)
        slot_s = began_s + completion.waited_s
        if completion.waited_s > LEAST_WAIT_S:
            RECORDER.past(SpanKind.ENGINE_QUEUE, context, began_s, slot_s)
        tokens = float(len(completion.tokens))
        RECORDER.past(SpanKind.GENERATE, context, slot_s, time.time(), figures={"tokens": tokens})
        self.completed(completion)
        return completion

    def completed(self, completion: Completion) -> None:
        """Counts a completion of the engine for this episode."""
        self._slots.on_completion(completion)

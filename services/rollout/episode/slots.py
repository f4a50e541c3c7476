"""Slots of the engine: an episode has one while it generates, and none while it waits for its environment."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from services.rollout.engine import Sample


def _nothing() -> None:
    pass


@dataclass
class Slots:
    """The slots of one lease. Every episode has one from the beginning, since it is about to generate."""

    episodes: int
    """Episodes that the lease asks for."""
    on_change: Callable[[], None] = _nothing
    """Called when `open` or `generating` has changed."""
    on_sample: Callable[[Sample], None] = lambda _: None
    """Called with each sample of the engine as it ends."""
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

    def sampled(self, sample: Sample) -> None:
        """The engine has ended a sample of the episode."""
        self._slots.on_sample(sample)

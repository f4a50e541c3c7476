"""Which of the open episodes go on: as many as the engine's cache keeps the prefixes of.

Each turn of an episode begins with the tokens of the turn before. While the episode waits for its environment, their
keys and values stay in the engine's cache only if it has room for those of all episodes. Otherwise every turn computes
its whole prompt again, and all episodes get slower the more of them are open. Therefore only the oldest episodes go on,
up to a limit that follows what the engine finds in its cache. The others wait before their first or next turn.
"""

import asyncio
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

from services.rollout.engine import CachedPrefix

FOUND = 0.75
"""A turn that finds less than this part of its prefix in the cache is short of it."""
DECREASE = 0.8
"""Part of the episodes that may go on after a turn that was short."""


@dataclass
class EpisodeLimit:
    """The number of episodes that may go on at the same time: additive increase, multiplicative decrease. Times are
    seconds of one clock."""

    most: int
    """The limit in the beginning, and at most."""
    least: int = 1
    """The limit at least: 1 to `most`."""
    _limit: float = field(init=False)
    _in_effect_from: float = field(default=-math.inf, init=False)
    """When no more episodes than the limit went on, after the last decrease; inf: more still do."""

    def __post_init__(self) -> None:
        self._limit = float(self.most)

    @property
    def limit(self) -> int:
        """Episodes that may go on, `least` to `most`."""
        return int(self._limit)

    def look(self, active: int, now: float) -> None:
        """Takes the number of episodes that go on now."""
        if self._in_effect_from == math.inf and active <= self.limit:
            self._in_effect_from = now

    def turn(self, prefix: int, cached: int, since: float, active: int, now: float) -> None:
        """A turn after the first began. `prefix`: tokens that a cache of enough room has of its prompt; `cached`: those
        that the cache had. `since`: when they were last used. `active`: episodes that go on now."""
        if since < self._in_effect_from or not prefix:
            return  # what was lost was lost under an earlier limit
        if cached < FOUND * prefix:
            self._limit = max(float(self.least), min(self._limit, active) * DECREASE)
            self._in_effect_from = now if active <= self.limit else math.inf
        elif active >= self.limit:  # fewer do not tell whether as many as the limit have room
            self._limit = min(float(self.most), self._limit + 1.0 / self._limit)


@dataclass(frozen=True)
class Seen:
    """What the engine has seen of a prompt with the turn before."""

    tokens: int
    """The first tokens of the prompt, of which it had computed keys and values."""
    cached: CachedPrefix
    """The cached prefix of the turn before."""


class Place:
    """The place of one episode among those that are open."""

    def __init__(self) -> None:
        self.waits: asyncio.Event | None = None
        """Set once the episode may go on; None while it goes on."""
        self.resumed_at = -math.inf
        """When the episode last went on after a wait, on the clock `time.monotonic`."""
        self.waited_s = 0.0
        self.prefix_tokens = self.cached_prefix_tokens = 0
        """Tokens of this episode, counted as in `Admission`."""


class Admission:
    """The episodes of a job that are open on this replica, in the order of their leases."""

    def __init__(self, limit: EpisodeLimit | None = None) -> None:
        """`limit`: None lets all episodes go on."""
        self._limit = limit
        self._places: dict[Place, None] = {}
        self.waiting = 0
        """Episodes that wait to begin or to go on."""
        self.prefix_tokens = self.cached_prefix_tokens = 0
        """Tokens of the turn before with which later turns began, and those of them that were in the cache."""

    @property
    def limit(self) -> int | None:
        """Episodes that may go on; None: all."""
        return None if self._limit is None else self._limit.limit

    @property
    def active(self) -> int:
        """Episodes that are open and do not wait here."""
        return len(self._places) - self.waiting

    @contextmanager
    def place(self) -> Iterator[Place]:
        """The place of an episode, from its beginning to its end."""
        place = Place()
        self._places[place] = None
        try:
            yield place
        finally:
            del self._places[place]
            self._changed()

    def goes_on(self, place: Place) -> bool:
        """Whether the episode is one of the oldest, as many as may go on."""
        most = sys.maxsize if self._limit is None else self._limit.limit
        return len(self._places) <= most or place in islice(self._places, most)

    async def wait(self, place: Place) -> None:
        """Waits until the episode may go on: at its beginning, or before a turn."""
        if self.goes_on(place):
            return
        place.waits, began = asyncio.Event(), time.monotonic()
        self.waiting += 1
        self._changed()
        try:
            await place.waits.wait()
        finally:
            self.waiting -= 1
            place.waits, place.resumed_at = None, time.monotonic()
            place.waited_s += place.resumed_at - began

    def turn(self, place: Place, seen: Seen, cached: CachedPrefix) -> None:
        """A turn after the first ended, which had found `cached`."""
        if seen.cached.key != cached.key:
            return  # the weights have changed since: no cache could have its prefix
        prefix = seen.tokens // cached.block * cached.block
        found = min(cached.tokens, prefix)
        for counts in (self, place):
            counts.prefix_tokens += prefix
            counts.cached_prefix_tokens += found
        # An episode that was held back gave its prefix up.
        if self._limit is not None and seen.cached.at >= place.resumed_at:
            self._limit.turn(prefix, found, seen.cached.at, self.active, time.monotonic())
            self._changed()

    def _changed(self) -> None:
        """Lets episodes go on that may."""
        if self._limit is None:
            return
        self._limit.look(self.active, time.monotonic())
        if self.waiting:
            for place in islice(self._places, self._limit.limit):
                if place.waits is not None:
                    place.waits.set()

"""Members that wait for leases. A few are woken at a time: waking all of them at every change would cost the square of
their number. Those that wait at the same time share the open prompts by their free slots."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager

from millrace.ids import MemberId

AT_ONCE = 8
"""Members that look for leases at the same time after a ring."""
MOST_SORTED = 64
"""Members that wait, those with the most free slots first, if they are no more than this. More look in the order in
which they came: sorting them for every look would cost too much."""
TRUSTED_S = 5.0
"""Seconds for which an empty queue is taken to stay empty."""


class Line:
    """A line of members that wait. `ring()` says that there may be leases: the first members look, and as long as they
    find some, the next ones look too. The others sleep on.

    A member looks before it waits, so only a ring since then has to wake it.
    """

    def __init__(self, may_look: Callable[[MemberId], bool]) -> None:
        self.rings = 0
        """How often `ring` was called."""
        self._may_look = may_look
        """Whether a member could get leases now, as far as that is known without asking the store."""
        self._waiting: dict[MemberId, asyncio.Future[bool]] = {}
        self._free: dict[MemberId, int] = {}
        """Samples that each member in the line could start."""
        self._claiming: dict[MemberId, int] = {}
        """Samples that each member could start that claims leases, or is about to."""
        self._turn = asyncio.Lock()
        self._served: set[MemberId] = set()
        """Members that got leases since the last ring."""
        self._looking = 0
        self._more = False
        """Whether there may be leases for more members than those that look now."""
        self._scheduled = False
        self._nothing_at = -1
        """The number of rings when a member last found that nothing is there."""
        self._nothing_until = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether a member found lately, and since the last ring, that there are no leases for anybody."""
        return self._nothing_at == self.rings and time.monotonic() < self._nothing_until

    @property
    def is_served(self) -> bool:
        """Whether members of the line are about to look. A member that comes now is behind them. Those that wait since
        they looked out of the line, and had no room for what is there, are not."""
        return self._more and bool(self._waiting) and (self._looking > 0 or self._scheduled)

    @asynccontextmanager
    async def turn(self, member_id: MemberId, free: int) -> AsyncIterator[float]:
        """A member's turn to claim leases. Its share of the open prompts: its free slots, by those of all that want
        leases and got none since the last ring. One member claims after another, and the last gets what is left."""
        self._claiming[member_id] = free
        try:
            async with self._turn:
                others = self._unserved(self._free, member_id) + self._unserved(self._claiming, member_id)
                yield free / max(1, free + others)
        finally:
            self._claiming.pop(member_id, None)

    def _unserved(self, free: Mapping[MemberId, int], but: MemberId) -> int:
        return sum(each for member, each in free.items() if member != but and member not in self._served)

    def served(self, member_id: MemberId) -> None:
        """Says that a member got leases: it comes after the others until the next ring."""
        self._served.add(member_id)

    def found_nothing(self, rings: int) -> None:
        """Says that there are no leases for anybody; `rings` is their number before the look."""
        self._nothing_at, self._nothing_until = rings, time.monotonic() + TRUSTED_S

    def ring(self) -> None:
        """Lets the first members look, soon. Several calls in a row cost as much as one."""
        self.rings += 1
        self._served.clear()
        self._more = True
        if self._waiting and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._advance)

    def wake(self, member_id: MemberId) -> None:
        """Lets one member look, out of turn."""
        if (waiting := self._waiting.get(member_id)) is not None:
            self._wake(waiting)

    def wake_all(self) -> None:
        """Lets all members look."""
        for waiting in self._waiting.values():
            self._wake(waiting)

    async def wait(self, member_id: MemberId, rings: int, timeout_s: float, free: int = 0) -> bool:
        """Waits until it is the member's turn to look; `rings` is their number before its last look, and `free` how
        many samples it could start. False if its turn does not come within `timeout_s`. After True the member looks,
        and calls `looked` in any case."""
        if rings != self.rings:
            self._looking += 1
            return True
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(timeout_s, _give_up, waiting)
        self._waiting[member_id], self._free[member_id] = waiting, free
        try:
            return await waiting
        except asyncio.CancelledError:
            if not waiting.cancelled() and waiting.result():
                self.looked(rings, found=False, exhausted=False)
            raise
        finally:
            timer.cancel()
            if self._waiting.get(member_id) is waiting:
                del self._waiting[member_id], self._free[member_id]

    def looked(self, rings: int, *, found: bool, exhausted: bool) -> None:
        """Says what a member found; `rings` is their number before it looked. `exhausted`: it found nothing and would
        have taken a prompt of any purpose, so there is none for others either."""
        self._looking -= 1
        if found:
            self._more = True
        elif exhausted and rings == self.rings:
            self._more = False
            self.found_nothing(rings)
        self._advance()

    def _advance(self) -> None:
        """Lets as many members look as may do so at the same time."""
        self._scheduled = False
        if not self._more:
            return
        for member_id, waiting in self._in_order():
            if self._looking >= AT_ONCE:
                return
            if not waiting.done() and self._may_look(member_id):
                self._wake(waiting)
        if self._looking < AT_ONCE:
            self._more = False  # everybody who may look does so now

    def _in_order(self) -> Iterable[tuple[MemberId, asyncio.Future[bool]]]:
        """The members that wait, in the order in which they look."""
        if len(self._waiting) > MOST_SORTED:
            return self._waiting.items()
        return sorted(self._waiting.items(), key=lambda each: (each[0] in self._served, -self._free[each[0]]))

    def _wake(self, waiting: asyncio.Future[bool]) -> None:
        if not waiting.done():
            waiting.set_result(True)
            self._looking += 1


def _give_up(waiting: asyncio.Future[bool]) -> None:
    if not waiting.done():
        waiting.set_result(False)

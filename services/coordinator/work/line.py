"""Members that wait for leases. A few are woken at a time: waking all of them at every change would cost the square of
their number."""

import asyncio
import time
from collections.abc import Callable

from millrace.ids import MemberId

AT_ONCE = 8
"""Members that look for leases at the same time after a ring."""
TRUSTED_S = 5.0
"""For so long it is believed that there are no leases."""


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

    def found_nothing(self, rings: int) -> None:
        """Says that there are no leases for anybody; `rings` is their number before the look."""
        self._nothing_at, self._nothing_until = rings, time.monotonic() + TRUSTED_S

    def ring(self) -> None:
        """Lets the first members look, soon. Several calls in a row cost as much as one."""
        self.rings += 1
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

    async def wait(self, member_id: MemberId, rings: int, timeout_s: float) -> bool:
        """Waits until it is the member's turn to look; `rings` is their number before its last look. False where its
        turn does not come within `timeout_s`. After True the member looks, and calls `looked` in any case."""
        if rings != self.rings:
            self._looking += 1
            return True
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(timeout_s, _give_up, waiting)
        self._waiting[member_id] = waiting
        try:
            return await waiting
        except asyncio.CancelledError:
            if not waiting.cancelled() and waiting.result():
                self.looked(rings, found=False, exhausted=False)
            raise
        finally:
            timer.cancel()
            if self._waiting.get(member_id) is waiting:
                del self._waiting[member_id]

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
        for member_id, waiting in self._waiting.items():
            if self._looking >= AT_ONCE:
                return
            if not waiting.done() and self._may_look(member_id):
                self._wake(waiting)
        if self._looking < AT_ONCE:
            self._more = False  # everybody who may look does so now

    def _wake(self, waiting: asyncio.Future[bool]) -> None:
        if not waiting.done():
            waiting.set_result(True)
            self._looking += 1


def _give_up(waiting: asyncio.Future[bool]) -> None:
    if not waiting.done():
        waiting.set_result(False)

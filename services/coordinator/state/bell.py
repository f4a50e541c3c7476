"""Waking tasks that wait for a change, without polling."""

import asyncio
from collections.abc import Callable


class Bell:
    """`ring()` wakes all tasks that wait. Take `next()` before reading the state, so that no ring is missed:

    ring = bell.next()
    if not ready():
        await waited(ring, 10.0)
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._calls: list[Callable[[], None]] = []

    def on_ring(self, call: Callable[[], None]) -> None:
        """Makes every ring call `call`."""
        self._calls.append(call)

    def ring(self) -> None:
        self._event.set()
        self._event = asyncio.Event()
        for call in self._calls:
            call()

    def next(self) -> asyncio.Event:
        return self._event


async def waited(ring: asyncio.Event, timeout_s: float) -> bool:
    """Waits for `ring`; whether it came within `timeout_s`."""
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            await ring.wait()
    except TimeoutError:
        return False
    return True

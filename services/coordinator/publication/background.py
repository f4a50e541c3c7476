"""Calls that go on by themselves after their caller has stopped waiting for them."""

import asyncio
from collections.abc import Coroutine
from typing import Any

BRIEFLY_S = 0.5
"""How long `wait_briefly` waits for members that may hang."""


class BackgroundCalls:
    """Keeps references to its tasks until they are done, since the event loop does not."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, *calls: Coroutine[Any, Any, None]) -> list[asyncio.Task[None]]:
        """Starts `calls` as tasks; cancelling the caller does not cancel them."""
        tasks = [asyncio.create_task(call) for call in calls]
        for task in tasks:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return tasks

    async def wait_briefly(self, *calls: Coroutine[Any, Any, None]) -> None:
        """Starts `calls` and waits up to BRIEFLY_S for them; those that are not done by then go on."""
        if tasks := self.start(*calls):
            await asyncio.wait(tasks, timeout=BRIEFLY_S)

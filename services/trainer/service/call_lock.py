"""One thing at a time: the ranks do one command, and whoever asks for the same one waits for it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from millrace.errors import InvalidState, Unavailable

T = TypeVar("T")
Key = tuple[Any, ...]


@dataclass(frozen=True)
class RunningCall:
    """What is under way. `key` starts with its name and tells it from every other."""

    key: Key
    task: "asyncio.Task[Any]"


class CallLock:
    def __init__(self) -> None:
        self.current: RunningCall | None = None
        self.closed = ""
        """Why nothing new may begin; empty while it may."""

    async def run(self, key: Key, work: Callable[[], Awaitable[T]], *, wait: bool = False) -> T:
        """What `work` gives, or what the same `key` under way gives. It goes on when its callers have gone.

        Raises InvalidState while something else is under way, unless `wait`: then that is waited for. Unavailable
        when nothing may begin any more.
        """
        while wait and self.current is not None and self.current.key != key:
            await self.wait_until_free()
        running = self.current
        if running is None or running.key != key:
            running = self._begin(key, work)
        return await asyncio.shield(running.task)

    async def wait_until_free(self) -> None:
        """Waits for what is under way, however it ends."""
        if self.current is not None:
            await asyncio.wait([self.current.task])

    def _begin(self, key: Key, work: Callable[[], Awaitable[T]]) -> RunningCall:
        if self.closed:
            raise Unavailable(
                f"{key[0]} will not begin: {self.closed}.", "wait until the trainer is in the fleet again."
            )
        if self.current is not None:
            what = f"{key[0]} does not fit: the trainer is busy with {self.current.key[0]}."
            raise InvalidState(what, "ask GetStatus and wait until it is READY.")
        task = asyncio.ensure_future(self._run(work))
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # its callers may have gone
        self.current = RunningCall(key, task)
        return self.current

    async def _run(self, work: Callable[[], Awaitable[T]]) -> T:
        try:
            return await work()
        finally:
            self.current = None

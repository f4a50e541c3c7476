"""One thing at a time: the ranks do one command, and whoever asks for the same one waits for it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from millrace.errors import InvalidState, Unavailable

T = TypeVar("T")
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Turn:
    """What is under way. `key` starts with its name and tells it from every other."""

    key: Key
    task: "asyncio.Task[Any]"


class Turns:
    def __init__(self) -> None:
        self.current: Turn | None = None
        self.closed = ""
        """Why nothing new may begin; empty while it may."""

    async def take(self, key: Key, work: Callable[[], Awaitable[T]], *, patient: bool = False) -> T:
        """What `work` gives, or what the same `key` under way gives. It goes on when its callers have gone.

        Raises InvalidState while something else is under way, unless `patient`: then that is waited for. Unavailable
        when nothing may begin any more.
        """
        while patient and self.current is not None and self.current.key != key:
            await self.ended()
        turn = self.current
        if turn is None or turn.key != key:
            turn = self._begin(key, work)
        return await asyncio.shield(turn.task)

    async def ended(self) -> None:
        """Waits for what is under way, however it ends."""
        if self.current is not None:
            await asyncio.wait([self.current.task])

    def _begin(self, key: Key, work: Callable[[], Awaitable[T]]) -> Turn:
        if self.closed:
            raise Unavailable(
                f"{key[0]} will not begin: {self.closed}.", "wait until the trainer is in the fleet again."
            )
        if self.current is not None:
            what = f"{key[0]} does not fit: the trainer is busy with {self.current.key[0]}."
            raise InvalidState(what, "ask GetStatus and wait until it is READY.")
        task = asyncio.ensure_future(self._run(work))
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # its callers may have gone
        self.current = Turn(key, task)
        return self.current

    async def _run(self, work: Callable[[], Awaitable[T]]) -> T:
        try:
            return await work()
        finally:
            self.current = None

"""One call at a time on the ranks; a repeated call waits for the one that runs and gets its result."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from millrace.errors import InvalidState, Unavailable

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True)
class CallKey(Generic[Result_co]):
    """Identifies a call: calls with equal keys do the same and have the same result."""

    method: str
    """Name of the remote method."""
    result: type[Result_co]
    arguments: tuple[object, ...]


@dataclass(frozen=True)
class RunningCall:
    """The call that the ranks work on."""

    key: CallKey[object]
    task: asyncio.Task[object]


class CallLock:
    """Lets one call at a time use the ranks."""

    def __init__(self) -> None:
        self.current: RunningCall | None = None
        self.closed = ""
        """Why no new call may begin; empty while calls may begin."""

    async def run(self, key: CallKey[Result], work: Callable[[], Awaitable[Result]], *, wait: bool = False) -> Result:
        """Runs `work`, or joins the running call with the same key. The work continues when its callers have gone.

        While a call with another key runs, raises InvalidState, or waits for that call if `wait`. Raises Unavailable
        when no new call may begin.
        """
        while wait and self.current is not None and self.current.key != key:
            await self.wait_until_free()
        running = self.current
        if running is None or running.key != key:
            running = self._begin(key, work)
        result = await asyncio.shield(running.task)
        assert isinstance(result, key.result)
        return result

    async def wait_until_free(self) -> None:
        """Waits for the call that runs, whether it succeeds or fails."""
        if self.current is not None:
            await asyncio.wait([self.current.task])

    def _begin(self, key: CallKey[Result], work: Callable[[], Awaitable[Result]]) -> RunningCall:
        if self.closed:
            what = f"{key.method} cannot begin: {self.closed}."
            raise Unavailable(what, "wait until the trainer is in the fleet again.")
        if self.current is not None:
            what = f"{key.method} cannot begin: the trainer is busy with {self.current.key.method}."
            raise InvalidState(what, "ask GetStatus and wait until it is READY.")
        task = asyncio.ensure_future(self._run(work))
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # its callers may have gone
        self.current = RunningCall(key, task)
        return self.current

    async def _run(self, work: Callable[[], Awaitable[Result]]) -> object:
        try:
            return await work()
        finally:
            self.current = None

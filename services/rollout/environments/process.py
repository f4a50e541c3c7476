"""One process of an environment. It runs several episodes at the same time, and answers their calls in any order."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.rollout.user_process.process import ScoringProcess, WorkerDied


class EnvironmentProcess(ScoringProcess):
    """A process that answers several calls at once. After WorkerDied, or TimeoutError of a call, it is to be killed."""

    condemned = False
    """Whether it is about to be killed: a call blocked it, needed too much memory or left processes behind."""
    _reader: asyncio.Task[None] | None = None
    _death: WorkerDied | None = None
    _waiting: dict[int, "_Call"]

    async def ask(self, arguments: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer to one call. Raises WorkerDied, and TimeoutError where the process answers no call at all for
        `timeout_s`: a call may wait for those of other episodes. One that is cancelled goes on in the process."""
        if self._reader is None:
            self._waiting, self._reader = {}, asyncio.create_task(self._read())
        if self._death is not None:
            raise self._death
        self._asked += 1
        number = self._asked
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(timeout_s) as limit:
            self._waiting[number] = _Call(answer, limit, timeout_s)
            try:
                await self.send({"id": number, **arguments})
                return await answer
            finally:
                del self._waiting[number]

    async def end(self) -> None:
        """Kills the process and waits until none of its descendants is left."""
        await super().end()
        if self._reader is not None:
            await asyncio.wait({self._reader})

    async def _read(self) -> None:
        """Passes answers on until the process ends."""
        try:
            while True:
                reply = await self.receive()
                for call in self._waiting.values():
                    call.go_on()
                answered = self._waiting.get(reply.get("id", 0))
                if answered is not None and not answered.answer.done():
                    answered.answer.set_result(reply)
        except WorkerDied as death:
            self._death = death
            for call in self._waiting.values():
                if not call.answer.done():
                    call.answer.set_exception(death)


@dataclass(frozen=True)
class _Call:
    """A call that is not answered."""

    answer: asyncio.Future[dict[str, Any]]
    limit: asyncio.Timeout
    timeout_s: float

    def go_on(self) -> None:
        """Begins its time anew: the process has answered another call."""
        if not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time() + self.timeout_s)

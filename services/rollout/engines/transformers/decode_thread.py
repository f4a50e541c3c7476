"""A decode loop in a thread of its own, asked from one event loop."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from services.rollout.engine import Completion, EngineDied, Response, Sampling

if TYPE_CHECKING:
    from services.rollout.engines.transformers.decoding import DecodeLoop


class DecodeThread:
    """Runs one decode loop. It can be started once."""

    def __init__(self) -> None:
        self._loop: DecodeLoop
        self._decoding: Future[None] | None = None
        self._asked: set[asyncio.Future[Completion | None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decode")

    def start(self, decode_loop: "DecodeLoop") -> None:
        """Decodes from now on. Called on the event loop that asks for samples."""
        events, self._loop = asyncio.get_running_loop(), decode_loop
        self._decoding = self._thread.submit(decode_loop.run)
        self._decoding.add_done_callback(lambda _: events.call_soon_threadsafe(self._loop_ended))

    async def stop(self) -> None:
        """Ends the loop and its thread. Idempotent."""
        if self._decoding is not None:
            self._loop.stop()
            await asyncio.wait([asyncio.wrap_future(self._decoding)])
            self._decoding = None
        self._thread.shutdown(wait=False)

    @property
    def started(self) -> bool:
        """Whether the loop was started and not stopped."""
        return self._decoding is not None

    def counts(self) -> tuple[int, int]:
        """Samples running and waiting. Raises EngineDied if the loop has ended by itself."""
        if self._decoding is None:
            return 0, 0
        if self._decoding.done():
            raise EngineDied(f"the decode loop ended: {self._decoding.exception()}")
        return self._loop.counts()

    async def complete(
        self, prompt: Sequence[int], sampling: Sampling, response: Response | None = None
    ) -> Completion | None:
        """A sample, which continues the prefix of `response`; None if it was aborted. Cancelling the call aborts it.
        Raises EngineDied, and InvalidState if no version is in place."""
        from services.rollout.engines.transformers.decoding import Request

        events = asyncio.get_running_loop()
        ended: asyncio.Future[Completion | None] = events.create_future()

        def end(completion: Completion | None) -> None:
            events.call_soon_threadsafe(_settle, ended, completion)

        response = response or Response()
        request = Request(prompt, sampling, end, response.prefix)
        response.follow(request.after)
        self._asked.add(ended)
        try:
            self._loop.submit(request)
            completion = await ended
        finally:
            self._asked.discard(ended)
            if not ended.done() or ended.cancelled():
                self._loop.abort(request)
        self.counts()
        return completion

    def _loop_ended(self) -> None:
        for ended in self._asked:
            _settle(ended, None)


def _settle(ended: "asyncio.Future[Completion | None]", completion: Completion | None) -> None:
    if not ended.done():
        ended.set_result(completion)

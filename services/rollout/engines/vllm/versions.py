"""The version that sampled each token, for releases of vLLM whose outputs do not report it."""

import asyncio
from typing import Any

from millrace.errors import PublicationFailed
from millrace.ids import Version
from services.rollout.engine import VersionSpan

SETTLE_S = 10.0
"""Seconds that outputs may take to be counted once their engine has paused. It takes milliseconds."""
AT_ONCE_S = 0.1
"""Seconds for which every turn of the event loop is looked at; then it is looked at every 10 ms."""


class VersionMarks:
    """For every request in flight, how many tokens it had when each version was put in place."""

    def __init__(self) -> None:
        self._marks: dict[str, list[tuple[Version, int]]] = {}
        self._ended: dict[str, list[tuple[Version, int]]] = {}
        self._client: Any = None
        self._processor: Any = None
        self._counted = True
        """Whether AsyncLLM has counted the tokens of all outputs that it took from its queue."""

    def attach(self, llm: Any) -> None:
        """Follows an AsyncLLM that has not generated yet."""
        self._client, self._processor = llm.engine_core, llm.output_processor
        take = self._client.get_output_async

        async def taken() -> Any:
            self._counted = True  # it asks for the next output
            output = await take()
            self._counted = False
            return output

        self._client.get_output_async = taken

    def began(self, request_id: str, version: Version | None) -> None:
        self._marks[request_id] = [] if version is None else [(version, 0)]

    def ended(self, request_id: str) -> None:
        """The request's last token has arrived: versions from now on sampled none of its tokens."""
        self._ended[request_id] = self._marks.pop(request_id)

    def forget(self, request_id: str) -> None:
        self._marks.pop(request_id, None)
        self._ended.pop(request_id, None)

    async def swapped(self, version: Version) -> None:
        """Marks all requests in flight, of an AsyncLLM that is paused: no token is sampled. Raises PublicationFailed if
        their tokens are not counted in time: their versions would be guessed.

        The answer to the order to pause came after all outputs on the same socket, so they are in AsyncLLM's queue.
        What is waited for here is that their tokens are counted, and that every request that vLLM has finished has
        called `ended`: some turns of the event loop, without a message.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        while not (self._all_counted() and self._marks.keys() <= self._counts().keys()):
            if (waited_s := clock() - began) > SETTLE_S:
                raise self._unsettled(version)
            await asyncio.sleep(0 if waited_s < AT_ONCE_S else 0.01)
        counts = self._counts()
        for request_id, marks in self._marks.items():
            count = counts.get(request_id, 0)
            if marks and marks[-1][1] == count:
                marks.pop()
            marks.append((version, count))

    def spans(self, request_id: str, tokens: int) -> tuple[VersionSpan, ...]:
        """The versions of the first `tokens` response tokens of a request."""
        known = self._ended[request_id] if request_id in self._ended else self._marks[request_id]
        marks = [(v, start) for v, start in known if start < tokens]
        ends = [start for _, start in marks[1:]] + [tokens]
        return tuple(VersionSpan(v, start, end) for (v, start), end in zip(marks, ends, strict=True))

    def _unsettled(self, version: Version) -> PublicationFailed:
        missing = self._marks.keys() - self._counts().keys()
        state = f"{len(missing)} of {len(self._marks)} requests in flight are unknown to vLLM"
        if not self._all_counted():
            state = "vLLM's outputs are not all counted"
        what = f"version {version}: {state} {SETTLE_S:g} s after generation was paused: no token can be labelled."
        return PublicationFailed(what, "the version is published again; if it happens again, use a newer vLLM.")

    def _all_counted(self) -> bool:
        return self._counted and bool(self._client.outputs_queue.empty())

    def _counts(self) -> dict[str, int]:
        """Response tokens that have been counted, by the request id that `generate` was called with."""
        return {
            getattr(state, "external_req_id", request_id): state.detokenizer.num_output_tokens()
            for request_id, state in self._processor.request_states.items()
        }

"""The version that sampled each token, for releases of vLLM whose outputs do not report it."""

import asyncio
from typing import Any

from millrace.ids import Version
from services.rollout.engine import VersionSpan

SETTLE_S = 0.002
SETTLE_ROUNDS = 500


class VersionMarks:
    """For every request in flight, how many tokens it had when each version was put in place."""

    def __init__(self) -> None:
        self._marks: dict[str, list[tuple[Version, int]]] = {}
        self._ended: dict[str, list[tuple[Version, int]]] = {}

    def began(self, request_id: str, version: Version | None) -> None:
        self._marks[request_id] = [] if version is None else [(version, 0)]

    def ended(self, request_id: str) -> None:
        """The request's last token has arrived: versions from now on sampled none of its tokens."""
        self._ended[request_id] = self._marks.pop(request_id)

    def forget(self, request_id: str) -> None:
        self._marks.pop(request_id, None)
        self._ended.pop(request_id, None)

    async def swapped(self, llm: Any, version: Version) -> None:
        """Marks all requests in flight. `llm` is a paused AsyncLLM: no token is sampled, but tokens that were sampled
        before may still be on their way here. So the counts are read until they no longer change, and until every
        request that vLLM has finished has called `ended`."""
        counts = _counts(llm)
        for _ in range(SETTLE_ROUNDS):
            await asyncio.sleep(SETTLE_S)
            if (latest := _counts(llm)) == counts and self._marks.keys() <= counts.keys():
                break
            counts = latest
        for request_id, marks in self._marks.items():
            count = counts.get(request_id, 0)
            if marks and marks[-1][1] == count:
                marks.pop()
            marks.append((version, count))

    def spans(self, request_id: str, tokens: int) -> tuple[VersionSpan, ...]:
        """The versions of the first `tokens` response tokens of a request that has ended."""
        marks = [(v, start) for v, start in self._ended[request_id] if start < tokens]
        ends = [start for _, start in marks[1:]] + [tokens]
        return tuple(VersionSpan(v, start, end) for (v, start), end in zip(marks, ends, strict=True))


def _counts(llm: Any) -> dict[str, int]:
    """Response tokens that have arrived, by the request id that `generate` was called with."""
    return {
        getattr(state, "external_req_id", request_id): state.detokenizer.num_output_tokens()
        for request_id, state in llm.output_processor.request_states.items()
    }

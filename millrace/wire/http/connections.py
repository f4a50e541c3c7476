"""HTTP connections that cost nothing for long: callers that send or read too slowly are cut off."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

PATIENCE_S = 30.0
"""A connection on which nothing moves between two looks, this far apart, is cut off."""
LARGEST_HEAD = 64 << 10
"""Bytes of a request's headers."""
LARGEST_REST = 64 << 20
"""Bytes of a body that may still come after the answer; they are thrown away."""


class PatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # uvicorn chooses the class
    """One connection. uvicorn itself waits without a limit for the end of the headers, for the rest of a body that was
    not asked for, and for a reader."""

    _unfinished = 0
    """Bytes of headers, or of an unwanted body, since the last request began."""
    _look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._look_again(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if not self._between_requests or self.cycle is not before:
            self._unfinished = 0
            return
        self._unfinished += len(data)
        if self._unfinished > (LARGEST_REST if before is not None and before.more_body else LARGEST_HEAD):
            self.transport.abort()

    @property
    def _between_requests(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def _look_again(self, before: tuple[Any, bool, int] | None) -> None:
        """Cuts the connection off where nothing has moved since the look `before`."""
        unread = self.transport.get_write_buffer_size()
        now = (self.cycle, self._between_requests, unread)
        if now == before and (self._between_requests or unread):
            self.transport.abort()
        else:
            self._look = self.loop.call_later(PATIENCE_S, self._look_again, now)

"""A log that an incident cannot fill: equal incidents are counted."""

import asyncio
from typing import Any

import structlog

log = structlog.get_logger(__name__)
EVERY_S = 10.0
"""Equal incidents within this time are one line, with their number."""


class Tally:
    """Logs the first of many equal incidents at once, and the others as one line with their number."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        """For each key that was logged within EVERY_S: the incidents since then."""

    def add(self, event: str, *, key: str = "", **facts: Any) -> None:
        """Counts an incident. Incidents with the same event and `key` are equal; `facts` are logged with the first."""
        key = f"{event} {key}"
        if key in self._counts:
            self._counts[key] += 1
            return
        log.warning(event, **facts)
        self._counts[key] = 0
        asyncio.get_running_loop().call_later(EVERY_S, self._report, event, key)

    def _report(self, event: str, key: str) -> None:
        if times := self._counts.pop(key):
            log.warning(event, again=f"{times} more times within {EVERY_S:g} s", about=key.removeprefix(event).strip())

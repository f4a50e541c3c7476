"""The newest log lines of this process, kept in memory for people who look at a member from elsewhere."""

import collections
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from structlog.typing import EventDict, Processor

MOST_LINES = 200
LONGEST_MESSAGE, LONGEST_DETAILS = 2000, 4000
"""Bytes of UTF-8 that are kept of one line."""
LEFT_OUT = ("timestamp", "level", "event", "exception", "logger", "service", "color_message")
"""Parts of a line that are shown elsewhere, or say nothing about it."""


@dataclass(frozen=True)
class LogLine:
    """One line. Its texts are valid UTF-8; a longer one than is kept ends in `…`."""

    time: str
    """ISO 8601, in UTC."""
    level: str
    message: str
    details: str
    """Values as `name=value`, and below them the traceback of an error."""


class LogTail:
    """Keeps the last `lines` lines."""

    def __init__(self, lines: int = MOST_LINES) -> None:
        self._member = ""
        self._lines = collections.deque[LogLine](maxlen=lines)

    def handler(self, shared: Sequence[Processor], member: str) -> logging.Handler:
        """A handler for the root logger that keeps each line. `shared`: processors of lines that come from standard
        logging. `member`: the member that this process is; its lines do not repeat it."""
        self._member = member
        strip = structlog.stdlib.ProcessorFormatter.remove_processors_meta
        handler = _Keeping()
        handler.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                foreign_pre_chain=shared, processors=[strip, structlog.processors.format_exc_info, self._keep]
            )
        )
        return handler

    def newest(self, lines: int = 0) -> list[LogLine]:
        """The newest `lines` lines (0: all that are kept), the oldest first."""
        return list(self._lines)[-lines:]

    def _keep(self, _logger: object, _method: str, event: EventDict) -> str:
        self._lines.append(
            LogLine(
                time=str(event.get("timestamp", "")),
                level=str(event.get("level", "")),
                message=_cut(str(event.get("event", "")), LONGEST_MESSAGE),
                details=_cut(_details(event, self._member), LONGEST_DETAILS),
            )
        )
        return ""


class _Keeping(logging.Handler):
    """Has its formatter look at each line; writes nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.format(record)
        except Exception:  # as every handler: a line that cannot be formatted must not end its caller
            self.handleError(record)


def _details(event: EventDict, member: str) -> str:
    fields = {name: value for name, value in event.items() if name not in LEFT_OUT}
    if fields.get("member") == member:
        del fields["member"]
    values = " ".join(f"{name}={value}" for name, value in fields.items())
    return "\n".join(part for part in (values, str(event.get("exception", ""))) if part)


def _cut(text: str, most: int) -> str:
    """The text as valid UTF-8 of at most `most` bytes."""
    data = text.encode("utf-8", "replace")
    return data.decode() if len(data) <= most else data[: most - 3].decode("utf-8", "ignore") + "…"


TAIL = LogTail()
"""The lines of this process. `millrace.telemetry.logs.configure` fills it, every gRPC server serves it."""

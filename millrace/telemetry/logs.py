"""Logs: readable text on a terminal, otherwise one JSON object for each line.

`MILLRACE_LOG=json` or `MILLRACE_LOG=console` chooses the style regardless of the terminal; `MILLRACE_LOG_LEVEL` is INFO
by default. Standard logging (uvicorn, grpc, redis) has the same handler, so all lines of a process have one format.
Failures of standard output and error end nobody: a full disk costs lines, and nothing else. The newest lines are kept
in memory for people who look at a member from elsewhere.
"""

import collections
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO, cast

import structlog
from structlog.typing import EventDict, Processor

from millrace.errors import MillraceError

MOST_LINES = 200
LONGEST_MESSAGE, LONGEST_DETAILS = 2000, 4000
"""Bytes of UTF-8 that are kept of one line."""
LEFT_OUT = ("timestamp", "level", "event", "exception", "logger", "service", "color_message")
"""Parts of a line that are shown elsewhere, or say nothing about it."""


class LossyStream:
    """A text stream that counts what it cannot write. The first write that succeeds again is followed by a warning with
    the number of writes that were lost."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.lost = 0
        """Writes since the last one that succeeded."""
        self._why = ""

    def write(self, text: str) -> int:
        """Writes, as far as that is possible. What has no end of a line yet is kept, so that lines stay whole."""
        if self._done(lambda: self.stream.write(text)) and "\n" in text:
            self.flush()
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Writes each."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Writes what was kept, as far as that is possible."""
        if self._done(self.stream.flush) and (lost := self.lost):
            self.lost = 0  # first: the warning comes here too
            logging.getLogger(__name__).warning("%d writes to the log were lost: %s", lost, self._why)

    def _done(self, work: Callable[[], object]) -> bool:
        try:
            work()
        except OSError as error:
            self.lost, self._why = self.lost + 1, error.strerror or str(error)
            return False
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def take_over_standard_streams() -> None:
    """Makes sure that printing cannot make this process fail, a library's progress bar included."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, LossyStream):
            setattr(sys, name, cast(TextIO, LossyStream(stream)))


QUIET_LIBRARIES = ("asyncio", "grpc", "httpcore", "httpx", "hpack")
"""Libraries whose INFO lines say nothing about a job."""


def configure(service: str, member: str = "", stream: TextIO | None = None) -> None:
    """Sends the logs of this process to `stream`, by default standard error, which fails nobody from then on if it is a
    file on a full disk. Each line has `service` and `member`. The
    newest ones are kept too (`millrace.telemetry.logs`).

    Raises MillraceError if MILLRACE_LOG or MILLRACE_LOG_LEVEL has an unknown value.
    """
    if stream is None:
        take_over_standard_streams()
        stream = sys.stderr
    level = _level()
    identity = {"service": service} | ({"member": member} if member else {})
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.stdlib.ExtraAdder(),
        _without_vllms_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        lambda _logger, _method, event: {**identity, **event},
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=_line_renderers(stream))
    )
    root = logging.getLogger()
    root.handlers[:] = [handler, TAIL.handler(shared, member)]
    root.setLevel(level)
    for name in QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True


def _without_vllms_name(_logger: object, _method: str, event: EventDict) -> EventDict:
    """vLLM adds the name of the process to each line of standard logging, once it is imported."""
    event.pop("vllm_process_name", None)
    return event


@contextlib.contextmanager
def root_logger_restored() -> Iterator[None]:
    """Restores handlers and level of the root logger at the end. Some engines configure it for themselves."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _level() -> int:
    name = os.environ.get("MILLRACE_LOG_LEVEL", "INFO").upper()
    levels = logging.getLevelNamesMapping()
    if name not in levels:
        raise MillraceError(f"MILLRACE_LOG_LEVEL: {name}: is not a level.", "set DEBUG, INFO, WARNING or ERROR.")
    return levels[name]


def _line_renderers(stream: TextIO) -> list[Processor]:
    """The processors that turn an event into a line. Raises MillraceError if MILLRACE_LOG has an unknown value."""
    style = os.environ.get("MILLRACE_LOG", "console" if stream.isatty() else "json")
    strip = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if style == "console":
        colours = stream.isatty() and "NO_COLOR" not in os.environ
        return [strip, structlog.dev.ConsoleRenderer(colors=colours)]
    if style == "json":
        as_json = structlog.processors.JSONRenderer(default=str)
        return [strip, structlog.processors.format_exc_info, _message_first, as_json]
    raise MillraceError(f"MILLRACE_LOG: {style}: is not a style of logs.", "set json or console, or unset it.")


def _message_first(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Puts time, level and message first and the identity last; removes uvicorn's coloured copy of the message."""
    event.pop("color_message", None)
    leading = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event}
    trailing = {key: event.pop(key) for key in ("logger", "service", "member") if key in event}
    return leading | dict(event) | trailing


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

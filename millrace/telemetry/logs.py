"""Logs: for a person at a terminal, or one JSON object a line for everything else.

`MILLRACE_LOG=json` or `MILLRACE_LOG=console` overrides what the terminal suggests; `MILLRACE_LOG_LEVEL` is INFO unless
set. Standard logging (uvicorn, grpc, redis) goes through the same pipe, so a process writes one kind of line.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor

from millrace.errors import MillraceError

QUIET = ("asyncio", "grpc", "httpcore", "httpx", "hpack")
"""Libraries whose INFO lines tell nothing about a job."""


def configure(service: str, member: str = "", stream: TextIO | None = None) -> None:
    """Sends this process's logs to `stream` (standard error unless given), each line with `service` and `member`.

    Raises MillraceError where MILLRACE_LOG or MILLRACE_LOG_LEVEL has a value that means nothing.
    """
    stream = stream or sys.stderr
    level = _level()
    identity = {"service": service} | ({"member": member} if member else {})
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.stdlib.ExtraAdder(),
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
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=_ending(stream)))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in QUIET:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Whatever sets up the root logger for itself inside, as some engines do, it is afterwards as it was."""
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
        raise MillraceError(f"MILLRACE_LOG_LEVEL is {name}, which is no level.", "set DEBUG, INFO, WARNING or ERROR.")
    return levels[name]


def _ending(stream: TextIO) -> list[Processor]:
    """What turns an event into a line."""
    style = os.environ.get("MILLRACE_LOG", "console" if stream.isatty() else "json")
    strip = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if style == "console":
        colours = stream.isatty() and "NO_COLOR" not in os.environ
        return [strip, structlog.dev.ConsoleRenderer(colors=colours)]
    if style == "json":
        as_json = structlog.processors.JSONRenderer(default=str)
        return [strip, structlog.processors.format_exc_info, _message_first, as_json]
    raise MillraceError(f"MILLRACE_LOG is {style}, which is no style of logs.", "set json or console, or unset it.")


def _message_first(_logger: object, _method: str, event: EventDict) -> EventDict:
    """What a person looks for comes first in a line, the identity last; uvicorn's coloured copy is left out."""
    event.pop("color_message", None)
    leading = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event}
    trailing = {key: event.pop(key) for key in ("logger", "service", "member") if key in event}
    return leading | dict(event) | trailing

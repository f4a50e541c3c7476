"""The newest lines of a process, as it keeps them in memory."""

import io
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from millrace.telemetry import logs
from millrace.telemetry.logs import LONGEST_DETAILS, LONGEST_MESSAGE, LogTail


@pytest.fixture
def tail(monkeypatch: pytest.MonkeyPatch) -> Iterator[LogTail]:
    made = LogTail(3)
    monkeypatch.setattr(logs, "TAIL", made)
    monkeypatch.delenv("MILLRACE_LOG_LEVEL", raising=False)
    with logs.root_logger_restored():
        logs.configure("rollout", "rollout-1", io.StringIO())
        yield made
    structlog.reset_defaults()


def test_lines_of_both_kinds_of_logging_are_kept_in_order_and_the_oldest_go(tail: LogTail) -> None:
    log = structlog.get_logger("a")
    log.info("gone")
    log.info("lease taken", prompt="0-17", member="rollout-2")
    log.debug("below the level")
    logging.getLogger("of.a.library").warning("port %d", 7700)
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        log.exception("broke", member="rollout-1")
    first, second, third = tail.newest()
    assert (first.level, first.message, first.details) == ("info", "lease taken", "member=rollout-2 prompt=0-17")
    assert first.time.startswith("20") and first.time.endswith("Z")
    assert (second.level, second.message, second.details) == ("warning", "port 7700", "")
    assert (third.level, third.message) == ("error", "broke")
    assert third.details.startswith("Traceback") and third.details.endswith("ZeroDivisionError: division by zero")
    assert tail.newest(2) == [second, third]


def test_what_vllm_adds_to_every_line_is_left_out(tail: LogTail, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = logging.getLogRecordFactory()

    def factory(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = plain(*arguments, **named)
        record.vllm_process_name = "MainProcess"
        return record

    monkeypatch.setattr(logging, "_logRecordFactory", factory)
    logging.getLogger("of.a.library").warning("port 7700", extra={"tries": 2})
    (line,) = tail.newest()
    assert (line.message, line.details) == ("port 7700", "tries=2")


def test_long_lines_are_cut_at_whole_characters(tail: LogTail) -> None:
    structlog.get_logger().info("ä" * 5000, value="x" * 9000, odd="\ud800")
    (line,) = tail.newest()
    assert line.message.endswith("ä…") and LONGEST_MESSAGE - 2 <= len(line.message.encode()) <= LONGEST_MESSAGE
    assert line.details.endswith("x…") and len(line.details.encode()) == LONGEST_DETAILS


def test_a_line_that_cannot_be_formatted_ends_nobody(tail: LogTail) -> None:
    class Odd:
        def __str__(self) -> str:
            raise ValueError("odd")

    structlog.get_logger().info("before", value=Odd())
    structlog.get_logger().info("after")
    assert [line.message for line in tail.newest()][-1] == "after"

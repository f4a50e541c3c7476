import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.telemetry.logs import LossyStream

PROGRAM = """
import logging, structlog
from millrace.telemetry import logs
logs.configure("rollout", "rollout-1a2b3c4d")
structlog.get_logger("a.module").info("lease taken", prompt="0-17", seconds=0.5)
logging.getLogger("uvicorn.error").warning("port %d", 7700)
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger().exception("broke")
structlog.get_logger().debug("not shown")
"""


def run(program: str = PROGRAM, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ".", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_without_a_terminal_every_line_is_one_json_object_with_the_identity() -> None:
    done = run()
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["lease taken", "port 7700", "broke"]
    assert all(line["service"] == "rollout" and line["member"] == "rollout-1a2b3c4d" for line in lines)
    assert lines[0]["prompt"] == "0-17" and lines[0]["seconds"] == 0.5 and lines[0]["level"] == "info"
    assert lines[1]["logger"] == "uvicorn.error"
    assert "ZeroDivisionError" in lines[2]["exception"]
    assert list(lines[0])[:3] == ["timestamp", "level", "event"]


def test_console_style_is_for_people() -> None:
    done = run(MILLRACE_LOG="console")
    assert "lease taken" in done.stderr and "prompt=0-17" in done.stderr and "{" not in done.stderr.splitlines()[0]
    assert "\x1b" not in done.stderr


def test_level_is_taken_from_the_environment() -> None:
    assert "not shown" in run(MILLRACE_LOG_LEVEL="DEBUG").stderr


@pytest.mark.parametrize("variable", ["MILLRACE_LOG", "MILLRACE_LOG_LEVEL"])
def test_a_value_without_meaning_is_refused_with_a_fix(variable: str) -> None:
    done = run(**{variable: "loud"})
    assert done.returncode != 0 and variable in done.stderr and "Fix:" in done.stderr


def test_what_a_library_does_to_the_root_logger_is_undone() -> None:
    library = "with logs.root_logger_restored():\n    logging.basicConfig(force=True, level=logging.CRITICAL)\n"
    configured = 'logs.configure("rollout", "rollout-1a2b3c4d")\n'
    done = run(PROGRAM.replace(configured, configured + library))
    assert [json.loads(line)["event"] for line in done.stderr.splitlines()] == ["lease taken", "port 7700", "broke"]


FULL = """
import sys
from millrace.telemetry import logs
from millrace.telemetry.logs import LossyStream
sys.stderr = sys.stdout = open(sys.argv[1], "w")
logs.configure("rollout")
import logging
log = logging.getLogger("a.module")
for _ in range(3):
    print("a library prints")
    sys.stdout.flush()
    log.warning("lease lost")
room = open(sys.argv[2], "w")
for stream in (sys.stdout, sys.stderr):
    stream.stream = room
log.warning("lease found")
"""


def test_a_full_disk_costs_lines_and_ends_nobody(tmp_path: Path) -> None:
    told = tmp_path / "told"
    done = subprocess.run(
        [sys.executable, "-c", FULL, "/dev/full", str(told)],
        env={"PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line)["event"] for line in told.read_text().splitlines() if line]
    assert lines[0] == "lease found"
    assert re.fullmatch(r"\d+ writes to the log were lost: No space left on device", lines[1])


def test_lines_reach_the_file_whole() -> None:
    written: list[str] = []

    class File(io.StringIO):
        def flush(self) -> None:
            written.append(self.getvalue())

    stream = LossyStream(File())
    print("a", "b", file=stream)  # type: ignore[call-overload]
    assert written == ["a b\n"]

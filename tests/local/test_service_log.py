import stat
from pathlib import Path

import pytest

from millrace.local.service_log import ServiceLog, loud, readable


def test_only_warnings_and_worse_reach_the_console() -> None:
    assert loud('{"level": "info", "event": "lease taken"}') == ""
    told = loud(
        '{"timestamp": "2026", "level": "error", "event": "lease lost", "prompt": "0-17", "service": "rollout"}'
    )
    assert told == "ERROR lease lost prompt=0-17"
    assert loud("ERROR 07-01 12:00:00 [core.py:12] out of memory") == "ERROR 07-01 12:00:00 [core.py:12] out of memory"
    assert loud("INFO 07-01 12:00:00 [core.py:12] ready") == ""


def test_a_trace_keeps_its_lines() -> None:
    assert (
        readable('{"level": "error", "event": "broke", "exception": "Traceback\\n  x"}')
        == "ERROR broke\nTraceback\n  x"
    )


def test_lines_are_told_once_and_only_when_they_are_whole(tmp_path: Path) -> None:
    log = ServiceLog(tmp_path, "trainer")
    with log.opened(("trainer",)) as file:
        file.write(b"ERROR one\nERROR tw")
        file.flush()
        assert list(log.loud_lines()) == ["ERROR one"]
        file.write(b"o\n")
        file.flush()
        assert list(log.loud_lines()) == ["ERROR two"]
        assert list(log.loud_lines()) == []


def test_the_last_lines_are_those_of_the_last_life(tmp_path: Path) -> None:
    log = ServiceLog(tmp_path, "trainer")
    with log.opened(("trainer",)) as file:
        file.write(b"old\n")
    with log.opened(("trainer",)) as file:
        file.write(b'new\n{"level": "error", "event": "port taken"}\n')
    assert log.last_lines(5) == ["new", "ERROR port taken"]
    assert "old" in log.path.read_text()


def test_a_full_disk_keeps_no_service_from_starting(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = ServiceLog(tmp_path, "trainer")
    log.path.symlink_to("/dev/full")
    with log.opened(("trainer",)) as file, pytest.raises(OSError, match="No space"):
        file.write(b"the service learns it by itself")
    log.path.unlink()
    log.path.symlink_to(tmp_path / "none" / "there")
    with log.opened(("trainer",)) as file:
        file.write(b"nowhere")
    assert f"{log.path} cannot be written" in capfd.readouterr().err
    assert log.last_lines(5) == []


def test_others_cannot_read_a_log(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir(mode=0o755)
    log = ServiceLog(tmp_path / "logs", "trainer")
    log.opened(("trainer",)).close()
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(log.path.parent.stat().st_mode) == 0o700

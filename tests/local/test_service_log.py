from pathlib import Path

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

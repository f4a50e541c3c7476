import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millrace.cli import app
from millrace.local.service_log import start_of_last_lines


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer.log").write_text('{"timestamp": "T1", "level": "info", "event": "step done"}\n')
    (tmp_path / "logs" / "rollout-0.log").write_text("one\ntwo\nthree\nunfinish")
    return tmp_path


def logs(state: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["logs", *arguments, "--state", str(state)])


def test_the_last_lines_of_all_services_have_their_names(state: Path) -> None:
    assert logs(state, "--lines", "2").stdout.splitlines() == [
        "  rollout-0 | three",
        "  rollout-0 | unfinish",
        "    trainer | T1 INFO step done",
    ]


def test_lines_of_one_service_stand_alone(state: Path) -> None:
    assert logs(state, "trainer").stdout == "T1 INFO step done\n"
    assert logs(state, "rollout-0", "-n", "0").stdout == ""


def test_without_logs_or_service_the_error_says_what_there_is(state: Path, tmp_path: Path) -> None:
    misspelt = logs(state, "trainr")
    assert misspelt.exit_code == 1
    assert "did you mean `trainer`? choose from rollout-0, trainer." in misspelt.stderr
    nothing = logs(tmp_path / "elsewhere")
    assert nothing.exit_code == 1 and "there are no logs in" in nothing.stderr and "--state" in nothing.stderr
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("text", [b"", b"a", b"a\n", b"a\nb", b"a\nb\n", b"\n\na\n\n", b"\n"])
@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_the_start_of_the_last_lines_is_where_a_slow_reading_finds_it(tmp_path: Path, text: bytes, count: int) -> None:
    path = tmp_path / "log"
    path.write_bytes(text)
    lines = text.splitlines(keepends=True)
    expected = b"".join(lines[len(lines) - count :] if count < len(lines) else lines)
    assert text[start_of_last_lines(path, count) :] == (expected if count else b"")


@pytest.mark.slow
def test_following_prints_what_is_added_and_services_that_come_later(state: Path) -> None:
    argv = (sys.executable, "-m", "millrace", "logs", "--follow", "--lines", "1", "--state", str(state))
    # A shell that put this test into the background has it ignore interrupts, and what it starts too.
    with_interrupts = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    following = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, preexec_fn=with_interrupts)
    assert following.stdout is not None
    assert "step done" in following.stdout.readline()
    with (state / "logs" / "rollout-0.log").open("a") as file:
        file.write("ed\n")
    assert following.stdout.readline() == "  rollout-0 | unfinished\n"
    (state / "logs" / "rollout-1.log").write_text("joined\n")
    assert following.stdout.readline() == "  rollout-1 | joined\n"
    following.send_signal(signal.SIGINT)
    assert following.wait(30) == 130

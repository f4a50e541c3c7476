"""What a life of a service's processes leaves to the next, with real processes that die in several ways."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.local.lives import Life
from millrace.wire import last_words

DYING = """
import os, sys
from pathlib import Path
from millrace.local.lives import Life
from millrace.wire import last_words

folder, joins, how = Path(sys.argv[1]), sys.argv[2] == "joins", sys.argv[3]
life = Life(folder)
if (pid := os.fork()) == 0:
    os.environ[last_words.FOLDER] = str(folder)
    last_words.listen()
    if joins:
        last_words.joined("trainer-1")
    print('{"level": "info", "event": "ordinary"}', file=sys.stderr)
    print("the loss is a lemon", file=sys.stderr, flush=True)
    if how == "segfault":
        import ctypes
        def users_loss():
            ctypes.string_at(0)
        users_loss()
    os._exit(0 if how == "in order" else 7)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
life.end("" if status == 0 else f"ended with {status}")
"""


def told(folder: Path, *how: str) -> tuple[str, str, str] | None:
    """What the next life tells of one that died like this, its standard error a file."""
    with (folder / "log").open("ab") as log:
        subprocess.run((sys.executable, "-c", DYING, str(folder / "lives"), *how), stderr=log, check=True)
    os.environ[last_words.FOLDER] = str(folder / "lives")
    try:
        found = last_words.previous()
    finally:
        del os.environ[last_words.FOLDER]
    return None if found is None else (found.member_id, found.ended, found.last_words)


def test_a_process_that_ends_itself_is_quoted(tmp_path: Path) -> None:
    assert told(tmp_path, "joins", "exit") == ("trainer-1", "ended with 7", "the loss is a lemon")


def test_a_process_that_a_signal_ends_leaves_the_line_of_the_users_code(tmp_path: Path) -> None:
    found = told(tmp_path, "joins", "segfault")
    assert found is not None
    member, ended, words = found
    assert (member, ended) == ("trainer-1", "ended with -11")
    assert "Segmentation fault" in words and "in users_loss" in words


@pytest.mark.parametrize("how", [("joins", "in order"), ("does not join", "exit")])
def test_a_life_that_ended_in_order_or_never_joined_leaves_nothing(tmp_path: Path, how: tuple[str, str]) -> None:
    told(tmp_path, "joins", "exit")
    assert told(tmp_path, *how) is None


def test_a_life_forgets_who_the_one_before_was(tmp_path: Path) -> None:
    (tmp_path / last_words.MEMBER).write_text("rollout-1")
    assert not Life(tmp_path).joined

"""Python modules of others, looked at without running them in this process: whether they can be imported, and what the
syntax tree of a file says.

An import may take seconds, and may crash, so it is tried in a process of its own.

`python -m millrace.imports` forks one process for each group of modules, from one that has imported what they have in
common: torch takes seconds.
"""

import ast
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

TIMEOUT_S = 180
"""Seconds for the modules of one group."""
AT_A_TIME = max(1, (os.cpu_count() or 2) // 2)
"""Groups that are imported at a time."""
ATTEMPTS = 5
_ONE_AT_A_TIME = threading.Lock()


def failures(groups: Mapping[str, Sequence[str]], *, first: str = "") -> Iterator[tuple[str, str]]:
    """The name of each group with the last line of its error, empty if all its modules can be imported, as soon as it
    is known. `first` is a module that all groups import; if it fails, each group reports its own error."""
    command = [sys.executable, "-m", __name__, json.dumps(dict(groups)), first]
    left = dict(groups)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            name, failure = json.loads(line)
            del left[name]
            yield name, failure
    for name in left:
        yield name, f"importing {first or 'it'} {_ended(process.returncode)}"


def _main(groups: Mapping[str, Sequence[str]], first: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what modules print is no answer
    signal.alarm(TIMEOUT_S)
    if first:
        with contextlib.suppress(Exception):  # the groups tell
            importlib.import_module(first)
    signal.alarm(0)
    waiting, running = list(groups.items()), dict[int, tuple[str, IO[str]]]()
    output: IO[str]
    while waiting or running:
        while waiting and len(running) < AT_A_TIME:
            name, modules = waiting.pop(0)
            output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - until the process has ended
            if (process := os.fork()) == 0:
                _attempt(modules, output)
            running[process] = name, output
        ended, status = os.wait()
        if ended in running:
            name, output = running.pop(ended)
            with output:
                output.seek(0)
                code = os.waitstatus_to_exitcode(status)
                failure = output.read() or (f"importing it {_ended(code)}" if code else "")
            print(json.dumps([name, failure]), file=answers, flush=True)


def _attempt(modules: Sequence[str], output: IO[str]) -> NoReturn:
    """Imports the modules, writes the last line of the error, and ends the process."""
    signal.alarm(TIMEOUT_S)
    try:
        for name in modules:
            importlib.import_module(name)
    except BaseException as error:  # a module may also raise SystemExit
        output.write("".join(traceback.format_exception_only(error)).strip().rpartition("\n")[2])
        output.flush()
        os._exit(1)
    os._exit(0)


def _ended(code: int) -> str:
    return f"takes more than {TIMEOUT_S} s" if code == -signal.SIGALRM else f"ended with status {code}"


def syntax_tree(path: Path) -> ast.Module:
    """The syntax tree of a file. Raises SyntaxError and ValueError for a file that is not Python, OSError for one that
    cannot be read.

    CPython 3.11 counts the depth of all trees that threads make at the same time in one place, and raises SystemError
    now and then (python/cpython#106905). So one thread parses at a time here, and again if code of others parsed.
    """
    source = path.read_bytes()
    with _ONE_AT_A_TIME:
        for _ in range(ATTEMPTS - 1):
            try:
                return ast.parse(source, filename=str(path))
            except SystemError:
                continue
        return ast.parse(source, filename=str(path))


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]), sys.argv[2])

"""One scoring process: reads JSON lines on its standard input, answers each on what was its standard output.

First line in: the fields of `Setup`, {parent, control}. First line out: {"ready": true, "missing": [[boundary, reason],
...]}, or {"refused": {what, fix}}, or {"failure": text}, or {"uncontained": [[boundary, reason], ...]} where the job
requires every boundary. From then on one request at a time, {id, data_source, solution_str, ground_truth, extra_info};
the answer is {id, seconds} and {score, details}, {failure} or {out_of_memory}. It ends when its input does.

The function is loaded and runs inside a sandbox (`millrace.sandbox`).
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from millrace.errors import InvalidJob
from millrace.rewards.locate import FunctionNotFound, parse, source_file
from millrace.rewards.outcome import BadOutcome, read_outcome
from millrace.rewards.registry import ComputeScore, load
from millrace.sandbox.boundaries import Missing
from millrace.sandbox.first import Wanted
from millrace.sandbox.launch import confine
from millrace.sandbox.view import view

LONGEST_DETAILS = 16 << 10
LONGEST_FAILURE = 500


def main() -> None:
    requests, replies = _take_pipes()
    setup = json.loads(requests.readline())
    seen = view([*_code(setup["function"]), *map(Path, setup["paths"])], setup["hidden"])
    wanted = Wanted(seen, setup["memory_mb"], setup["network"], (requests.fileno(), replies.fileno()))
    confine(wanted, setup["parent"], setup["control"], lambda missing: _serve(setup, requests, replies, missing))


def _take_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Keeps the two pipes for the protocol. User code prints to standard error, and its standard input is empty."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, replies


def _code(function: str) -> list[Path]:
    """What the sandbox has to see for the function: its file, or the package that holds its module."""
    try:
        target = parse(function)
        file = source_file(target)
    except FunctionNotFound:
        return []  # a built-in reward, or one that `load` refuses
    if file is None:
        return []
    inner = 0 if target.is_file else target.place.count(".") + (file.name == "__init__.py")
    return [file.parents[inner - 1] if inner else file]


def _serve(setup: Mapping[str, Any], requests: Iterable[bytes], replies: IO[bytes], missing: Sequence[Missing]) -> None:
    told = [[each.boundary, each.reason] for each in missing]
    if told and setup["required"]:
        _reply(replies, {"uncontained": told})
        return
    function = _load(setup, replies)
    if function is None:
        return
    _reply(replies, {"ready": True, "missing": told})
    for line in requests:
        _reply(replies, _answer(function, line))


def _load(setup: Mapping[str, Any], replies: IO[bytes]) -> ComputeScore | None:
    try:
        return load(setup["function"], setup["options"])
    except InvalidJob as error:
        _reply(replies, {"refused": {"what": error.what, "fix": error.fix}})
    except BaseException as error:
        # The user's module runs here, and may raise anything.
        _reply(replies, {"failure": _told(error)})
    return None


def _answer(function: ComputeScore, line: bytes) -> dict[str, Any]:
    request = json.loads(line)
    number = request.pop("id")
    start = time.perf_counter()
    reply = _score(function, request)
    if "failure" in reply and _left_processes():
        reply["spoiled"] = True
    return {"id": number, "seconds": time.perf_counter() - start, **reply}


def _left_processes() -> bool:
    """Whether the function has started processes that still run. After a failure they would be in the way of the next
    call."""
    alone = {"1", str(os.getpid())}
    return os.getppid() == 1 and any(name.isdigit() and name not in alone for name in os.listdir("/proc"))


def _score(function: ComputeScore, arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        outcome = read_outcome(function(**arguments))
        details = outcome.details
        if (length := len(json.dumps(details))) > LONGEST_DETAILS:
            details = {"left_out": f"details of {length} characters, more than {LONGEST_DETAILS}"}
        return {"score": outcome.score, "details": details}
    except BadOutcome as error:
        return {"failure": str(error)}
    except MemoryError:
        return {"out_of_memory": True}
    except BaseException as error:
        # The user's function runs here, and may raise anything, SystemExit too.
        return {"failure": _told(error)}


def _told(error: BaseException) -> str:
    """An exception of user code as text: `raised ValueError: no digits (mine.py, line 12)`."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = f"raised {type(error).__name__}: {error}"
    return text[:LONGEST_FAILURE] + where


def _reply(replies: IO[bytes], reply: Mapping[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    main()

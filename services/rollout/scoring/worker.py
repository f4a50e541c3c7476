"""One scoring process: reads JSON lines on its standard input, answers each on what was its standard output.

First line in: {function, options, memory_mb, network, parent, lifeline}. First line out: {"ready": true, "network": why
it could not be left, or null}, or {"refused": {what, fix}}, or {"failure": text}. From then on one request at a time,
{id, data_source, solution_str, ground_truth, extra_info}; the answer is {id, seconds} and {score, details}, {failure}
or {out_of_memory}. It ends when its input does.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from millrace.errors import InvalidJob
from millrace.rewards.outcome import BadOutcome, read_outcome
from millrace.rewards.registry import ComputeScore, load
from services.rollout.scoring.isolation import die_with_parent, leave_network, limit_memory

LONGEST_DETAILS = 16 << 10
LONGEST_FAILURE = 500


def main() -> None:
    requests, replies = _take_pipes()
    setup = json.loads(requests.readline())
    network = None if setup["network"] else leave_network()
    die_with_parent(setup["parent"], setup["lifeline"])
    limit_memory(setup["memory_mb"])
    function = _load(setup, replies)
    if function is None:
        return
    _reply(replies, {"ready": True, "network": network})
    for line in requests:
        _reply(replies, _answer(function, line))


def _take_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Keeps the two pipes for the protocol. User code prints to standard error, and its standard input is empty."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, replies


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
    return {"id": number, "seconds": time.perf_counter() - start, **reply}


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

"""One scoring process: reads JSON lines on its standard input, answers each on what was its standard output.

First line in: the fields of `Setup`, {parent, control}. First line out: {"ready": true, "missing": [[boundary, reason],
...]}, or {"refused": {what, fix}}, or {"failure": text}, or {"uncontained": [[boundary, reason], ...]} where the job
requires every boundary. From then on one request at a time, {id, data_source, solution_str, ground_truth, extra_info};
the answer is {id, seconds} and {score, details}, {failure} or {out_of_memory}. It ends when its input does.

The function is loaded and runs inside a sandbox (`millrace.sandbox`).
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from millrace.errors import InvalidJob
from millrace.rewards.outcome import BadOutcome, read_outcome
from millrace.rewards.registry import ComputeScore, load
from millrace.sandbox.boundaries import Missing
from millrace.sandbox.first import Wanted
from millrace.sandbox.launch import confine
from millrace.sandbox.view import view
from services.rollout.scoring.sandboxed import code_of, left_processes, reply, take_pipes, told_error

LONGEST_DETAILS = 16 << 10


def main() -> None:
    requests, replies = take_pipes()
    setup = json.loads(requests.readline())
    seen = view([*code_of(setup["function"]), *map(Path, setup["paths"])], setup["hidden"])
    wanted = Wanted(seen, setup["memory_mb"], setup["network"], (requests.fileno(), replies.fileno()))
    confine(wanted, setup["parent"], setup["control"], lambda missing: _serve(setup, requests, replies, missing))


def _serve(setup: Mapping[str, Any], requests: Iterable[bytes], replies: IO[bytes], missing: Sequence[Missing]) -> None:
    told = [[each.boundary, each.reason] for each in missing]
    if told and setup["required"]:
        reply(replies, {"uncontained": told})
        return
    function = _load(setup, replies)
    if function is None:
        return
    reply(replies, {"ready": True, "missing": told})
    for line in requests:
        reply(replies, _answer(function, line))


def _load(setup: Mapping[str, Any], replies: IO[bytes]) -> ComputeScore | None:
    try:
        return load(setup["function"], setup["options"])
    except InvalidJob as error:
        reply(replies, {"refused": {"what": error.what, "fix": error.fix}})
    except BaseException as error:
        # The user's module runs here, and may raise anything.
        reply(replies, {"failure": told_error(error)})
    return None


def _answer(function: ComputeScore, line: bytes) -> dict[str, Any]:
    request = json.loads(line)
    number = request.pop("id")
    start = time.perf_counter()
    scored = _score(function, request)
    if "failure" in scored and left_processes():
        scored["spoiled"] = True
    return {"id": number, "seconds": time.perf_counter() - start, **scored}


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
        return {"failure": told_error(error)}


if __name__ == "__main__":
    main()

"""One process of an environment: reads JSON lines on its standard input, answers each on what was its standard output.

First line in: the fields of `EnvironmentSetup`, {parent, control}. First line out: {"ready": true, "missing": ...,
"tools": [...]}, otherwise as a scoring process says it (`services/rollout/scoring/worker.py`). From then on one request
at a time, {id} and a request of `millrace.environments.host`; the answer is {id} and that of the host, {failure} or
{out_of_memory}. It ends when its input does. The class is loaded and runs inside a sandbox (`millrace.sandbox`).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from millrace.environments.host import BadReturn, Host
from millrace.environments.registry import FIELD, load
from millrace.environments.tools import BadTool
from millrace.errors import InvalidJob, refused
from millrace.rewards.outcome import BadOutcome
from millrace.sandbox.boundaries import Missing
from millrace.sandbox.first import Wanted
from millrace.sandbox.launch import confine
from millrace.sandbox.view import view
from services.rollout.scoring.sandboxed import code_of, left_processes, reply, take_pipes, told_error


def main() -> None:
    requests, replies = take_pipes()
    setup = json.loads(requests.readline())
    seen = view([*code_of(setup["function"]), *map(Path, [*setup["code"], *setup["paths"]])], setup["hidden"])
    wanted = Wanted(seen, setup["memory_mb"], setup["network"], (requests.fileno(), replies.fileno()))
    confine(wanted, setup["parent"], setup["control"], lambda missing: _serve(setup, requests, replies, missing))


def _serve(setup: Mapping[str, Any], requests: Iterable[bytes], replies: IO[bytes], missing: Sequence[Missing]) -> None:
    told = [[each.boundary, each.reason] for each in missing]
    if told and setup["required"]:
        reply(replies, {"uncontained": told})
        return
    try:
        host = _host(setup)
    except InvalidJob as error:
        reply(replies, {"refused": {"what": error.what, "fix": error.fix}})
        return
    except BaseException as error:
        # The user's module runs here, and may raise anything.
        reply(replies, {"failure": told_error(error)})
        return
    reply(replies, {"ready": True, "missing": told, "tools": host.specs})
    for line in requests:
        reply(replies, _answer(host, json.loads(line)))


def _host(setup: Mapping[str, Any]) -> Host:
    try:
        return Host(load(setup["function"], setup["options"]), setup["options"], setup["call_s"])
    except BadTool as error:
        raise refused(
            FIELD, setup["function"], str(error), "annotate every parameter of a tool with its type."
        ) from error


def _answer(host: Host, request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"id": request["id"], **host.answer(request)}
    except (BadReturn, BadOutcome) as error:
        failure = str(error)
    except MemoryError:
        return {"id": request["id"], "out_of_memory": True}
    except BaseException as error:
        # The user's class runs here, and may raise anything, SystemExit too.
        failure = told_error(error)
    return {"id": request["id"], "failure": failure, "spoiled": left_processes()}


if __name__ == "__main__":
    main()

"""One scoring process: reads JSON lines on its standard input, answers each on what was its standard output.

First line in: the fields of `RewardSetup`, {parent, control}. First line out: {"ready": true, "missing": [[boundary,
reason], ...]}, or {"refused": {what, fix}}, or {"uncontained": [[boundary, reason], ...]} if
the job requires every boundary. From then on one request at a time, {id, term, data_source, answers, ground_truth,
extra_info}; the answer is {id, seconds} and {outcomes: [{score, details}, ...]}, {failure} or {out_of_memory}. It ends
when its input does.

The functions are loaded and run inside a sandbox (`millrace.sandbox`).
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

from millrace.errors import InvalidJob
from millrace.rewards.outcome import BadOutcome, Outcome, read_outcome, read_outcomes
from millrace.rewards.programs import limits
from millrace.rewards.registry import BUILT_IN, ComputeScore, load
from millrace.rewards.term import Scope, Term
from services.rollout.user_process import sandboxed


def outcomes(
    function: ComputeScore,
    scope: Scope,
    *,
    data_source: str,
    answers: Sequence[str],
    ground_truth: Any,
    extra_info: Mapping[str, Any],
) -> list[Outcome]:
    """The outcome of each answer, in order: from one call each, or from one call for all of them.

    Raises BadOutcome for a result that is no score, and passes on what the function raises.
    """
    if scope == "answer":
        row = {"data_source": data_source, "ground_truth": ground_truth, "extra_info": extra_info}
        return [read_outcome(function(solution_str=answer, **row)) for answer in answers]
    count = len(answers)
    returned = function(
        data_sources=[data_source] * count,
        solution_strs=list(answers),
        ground_truths=[ground_truth] * count,
        extra_infos=[dict(extra_info) for _ in answers],
    )
    return read_outcomes(returned, count)


LONGEST_DETAILS = 16 << 10
"""Characters of the details of one answer."""
LONGEST_DETAILS_OF_CALL = 512 << 10
"""Characters of the details of all answers of a call."""


def main() -> None:
    pipes = sandboxed.take_pipes()
    setup = json.loads(pipes[0].readline())
    code = [path for term in setup["terms"] for path in sandboxed.code_of(term["function"])]
    # `code` makes sandboxes of its own; by_data_source may name it.
    built_in = any(term["function"] in BUILT_IN for term in setup["terms"])
    sandboxed.confined(setup, pipes, code, _serve, user_namespaces=built_in)


def _serve(setup: Mapping[str, Any], requests: Iterable[bytes], replies: IO[bytes], lacking: sandboxed.Lacking) -> None:
    limits.set_for_process(limits.CallLimits(setup["timeout_s"], setup["memory_mb"]))
    functions: list[tuple[ComputeScore, Scope]] = []
    for term in setup["terms"]:
        function = _load(Term(**term), replies)
        if function is None:
            return
        functions.append((function, term["scope"]))
    sandboxed.reply(replies, {"ready": True, "missing": lacking})
    for line in requests:
        sandboxed.reply(replies, _answer(functions, line))


def _load(term: Term, replies: IO[bytes]) -> ComputeScore | None:
    try:
        return load(term.function, term.options, term.scope, term.field)
    except InvalidJob as error:
        sandboxed.reply(replies, {"refused": {"what": error.what, "fix": error.fix}})
    except BaseException as error:
        # The user's module runs here, and may raise anything.
        what = f"{term.field}.function: {term.function} {sandboxed.describe_error(error)} when it was imported."
        sandboxed.reply(replies, {"refused": {"what": what, "fix": "fix its module."}})
    return None


def _answer(functions: Sequence[tuple[ComputeScore, Scope]], line: bytes) -> dict[str, Any]:
    request = json.loads(line)
    number, (function, scope) = request.pop("id"), functions[request.pop("term")]
    start = time.perf_counter()
    scored = _score(function, scope, request)
    if "failure" in scored and sandboxed.left_processes():
        scored["spoiled"] = True
    return {"id": number, "seconds": time.perf_counter() - start, **scored}


def _score(function: ComputeScore, scope: Scope, request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = outcomes(function, scope, **request)
        most = min(LONGEST_DETAILS, LONGEST_DETAILS_OF_CALL // len(found))
        return {"outcomes": [{"score": each.score, "details": _short_enough(each.details, most)} for each in found]}
    except BadOutcome as error:
        return {"failure": str(error)}
    except MemoryError:
        return {"out_of_memory": True}
    except BaseException as error:
        # The user's function runs here, and may raise anything, SystemExit too.
        return {"failure": sandboxed.describe_error(error)}


def _short_enough(details: dict[str, Any], most: int) -> dict[str, Any]:
    length = len(json.dumps(details))
    return details if length <= most else {"left_out": f"details of {length} characters, more than {most}"}


if __name__ == "__main__":
    main()

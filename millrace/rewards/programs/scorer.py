"""Scores an answer by running its code against the test cases of its row."""

import math
import re
import time
from typing import Any

from millrace.errors import Unavailable
from millrace.rewards.programs import limits
from millrace.rewards.programs.cases import Case, cases_of
from millrace.sandbox import program
from millrace.sandbox.messages import Limit
from millrace.sandbox.program import Ended, ProgramSandbox, Room

BLOCK = re.compile(r"```([\w+#.-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON = ("", "py", "python", "python3")
SCORES = ("share", "all")
LONGEST_CASE_S = 3600.0
LEAST_MB, MOST_MB = 16, 1_000_000
LONGEST_FAILURE = 300


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    score: str = "share",
    timeout_s: float = 6.0,
    memory_mb: int = 512,
    max_cases: int | None = None,
) -> dict[str, Any]:
    """The part of the row's test cases that the answer's last code block in Python passes, or with `score: all` 1 if it
    passes all of them, otherwise 0.

    A case has standard input and output, arguments and result of a function, or statements such as `assert`;
    docs/rewards.md has the forms. Each runs in a sandbox without network, with an empty /tmp, for at most `timeout_s`
    seconds, in at most `memory_mb` of memory and at most half of `reward.memory_mb`. All cases together take at most
    `reward.timeout_s` less 5 seconds, or 0.8 of it; what is not run by then has not passed. `max_cases`: only the first
    ones count. Raises ValueError for a row without test cases.
    """
    cases = cases_of(ground_truth)[:max_cases]
    code = code_of(solution_str)
    if code is None:
        return {"score": 0.0, "passed": 0, "cases": len(cases), "failed": "the answer has no code block"}
    room = Room(memory_mb=min(memory_mb, max(LEAST_MB, limits.of_process().memory_mb // 2)))
    passed, failed = _run(code, cases, timeout_s, room, all_or_nothing=score == "all")
    given = float(passed == len(cases)) if score == "all" else passed / len(cases)
    return {"score": given, "passed": passed, "cases": len(cases), "failed": failed}


def check_options(
    score: str = "share", timeout_s: float = 6.0, memory_mb: int = 512, max_cases: int | None = None
) -> None:
    """Raises ValueError for a wrong value of an option."""
    if score not in SCORES:
        raise ValueError(f"score has to be {' or '.join(SCORES)}, not {score!r}")
    if not _is_number(timeout_s) or not 0 < timeout_s <= LONGEST_CASE_S:
        raise ValueError(f"timeout_s has to be a number of seconds up to {LONGEST_CASE_S:g}, not {timeout_s!r}")
    if not isinstance(memory_mb, int) or isinstance(memory_mb, bool) or not LEAST_MB <= memory_mb <= MOST_MB:
        raise ValueError(f"memory_mb has to be from {LEAST_MB} to {MOST_MB}, not {memory_mb!r}")
    if max_cases is not None and (not isinstance(max_cases, int) or isinstance(max_cases, bool) or max_cases < 1):
        raise ValueError(f"max_cases has to be at least 1, or null for all, not {max_cases!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_machine() -> None:
    """Raises Unavailable if a scoring process here cannot make sandboxes."""
    try:
        missing = program.missing()
    except program.SandboxFailed as error:
        raise Unavailable(f"{error}.", "see the standard error of the replica.") from error
    if missing:
        raise Unavailable(
            f"{program.Uncontained(missing)}, and no code of a model runs without all of them.",
            "allow user namespaces, also inside others (sysctl user.max_user_namespaces, "
            "kernel.apparmor_restrict_unprivileged_userns); `millrace doctor` shows the state.",
        )


def code_of(answer: str) -> str | None:
    """The last code block of an answer that is in Python or in no named language; None if there is none. A block at
    the end of an answer may be open."""
    blocks = [code for language, code in BLOCK.findall(answer) if language.lower() in PYTHON]
    return blocks[-1] if blocks else None


def _run(code: str, cases: list[Case], timeout_s: float, room: Room, *, all_or_nothing: bool) -> tuple[int, str | None]:
    """How many cases pass, and why the first one that does not."""
    budget_s = limits.of_process().budget_s
    deadline = time.monotonic() + budget_s
    passed, failed = 0, None
    with ProgramSandbox(room) as sandbox:
        for number, case in enumerate(cases, start=1):
            if (left := deadline - time.monotonic()) <= 0:
                failed = failed or f"case {number}: no time is left of the {budget_s:g} s for all cases"
                break
            ended = sandbox.run(case.program(code), min(timeout_s, left))
            if ended.well and case.passed(ended):
                passed += 1
                continue
            failed = failed or f"case {number}: {_reason(ended, room)}"
            if all_or_nothing:
                break
    return passed, failed


def _reason(ended: Ended, room: Room) -> str:
    """Why a case has not passed."""
    match ended.verdict.limit:
        case Limit.TIME:
            return f"it ran for {ended.seconds:.1f} s"
        case Limit.MEMORY:
            return f"it took more than {room.memory_mb} MB"
        case Limit.PROCESSES:
            return f"it started more than {room.processes} processes"
        case Limit.OUTPUT:
            return f"it printed more than {room.output_bytes} bytes"
    if ended.well:
        return "the result is not the expected one"
    how = f"signal {ended.verdict.signal}" if ended.verdict.signal is not None else f"status {ended.verdict.status}"
    last = ended.errors.strip().rpartition("\n")[2]
    return f"it ended with {how}: {last}"[:LONGEST_FAILURE]

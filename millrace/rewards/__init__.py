"""Scorers: from an answer to a number, with verl's signature.

    compute_score(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float, ...}

A function of the scope `group` gets all answers to a prompt at once, and returns a list:

    compute_score(data_sources, solution_strs, ground_truths, extra_infos) -> [float | {"score": float, ...}, ...]

`load` turns a name (`math`, `module:function`, `file.py:function`) and options into such a callable, `check` checks the
same name without running the user's code, `choose` resolves `auto`. A scorer is one file here and one line in
`registry.BUILT_IN`.
"""

from millrace.rewards.outcome import BadOutcome, Outcome, read_outcome
from millrace.rewards.registry import BUILT_IN, NEED_TRUTHS, ComputeScore, check, choose, load
from millrace.rewards.term import PoolTerm, Scope, Term

__all__ = [
    "BUILT_IN",
    "NEED_TRUTHS",
    "BadOutcome",
    "ComputeScore",
    "Outcome",
    "PoolTerm",
    "Scope",
    "Term",
    "check",
    "choose",
    "load",
    "read_outcome",
]

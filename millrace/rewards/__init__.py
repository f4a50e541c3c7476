"""Scorers: from an answer to a number, with verl's signature.

    compute_score(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float, ...}

`load` turns a name (`math`, `module:function`, `file.py:function`) and options into such a callable, `check` checks the
same name without running the user's code, `choose` resolves `auto`. A scorer is one file here and one line in
`registry.BUILT_IN`.
"""

from millrace.rewards.outcome import BadOutcome, Outcome, read_outcome
from millrace.rewards.registry import BUILT_IN, ComputeScore, check, choose, load

__all__ = ["BUILT_IN", "BadOutcome", "ComputeScore", "Outcome", "check", "choose", "load", "read_outcome"]

"""Calls of a scorer for answers to one prompt, in the signature of its scope."""

from collections.abc import Mapping, Sequence
from typing import Any

from millrace.rewards.outcome import Outcome, read_outcome, read_outcomes
from millrace.rewards.registry import ComputeScore
from millrace.rewards.term import Scope


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

"""Scores a few rows of a job's data, in the processes in which a replica scores its groups.

`python -m services.rollout.trial` reads JSON lines on its standard input: first {spec, terms}, the job spec and the
functions of the reward, then rows, {row, data_source, answer, ground_truth, extra_info}. It prints a line a row, in the
order in which they are scored: {row, score, details}, or {row, failure}. If the function cannot be loaded it prints
{mistakes} alone. With {spec, judges: true} the judges are asked instead, about rows that have {prompt} too; each line
names the judge's {field}.
"""

import asyncio
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from millrace.data.row import PromptRow
from millrace.errors import InvalidJob, MillraceError, Mistake
from millrace.rewards import Term
from millrace.rewards.judge_template import text_of
from millrace.spec import JobSpec, parse
from millrace.telemetry import logs
from millrace.validation.limits import SHORTEST_S
from services.rollout.judges.scorer import JudgeScorer
from services.rollout.scoring.pool import ScoringPool
from services.rollout.scoring.scored import Answer, Scored

PROCESSES = 2


async def score(spec: JobSpec, terms: Sequence[Term], rows: list[dict[str, Any]]) -> None:
    """Prints the result of every row. Raises InvalidJob, Unavailable."""
    pool = ScoringPool.of_job(spec.reward, terms, min(PROCESSES, len(rows)))
    await pool.start()
    try:
        waiting = iter(rows)
        await asyncio.gather(*(_score_some(pool, waiting) for _ in range(PROCESSES)))
    finally:
        await pool.close()


async def _score_some(pool: ScoringPool, waiting: Iterable[dict[str, Any]]) -> None:
    for row in waiting:
        answer, truth = row["answer"], row["ground_truth"]
        (scored,) = await pool.score_group(row["data_source"], [answer], truth, row["extra_info"])
        _print({"row": row["row"], **_result(scored)})


async def ask_judges(spec: JobSpec, rows: list[dict[str, Any]]) -> None:
    """Prints what every judge behind a URL gives to every row; one that does not answer is not asked again. Raises
    InvalidJob."""
    once, asked = {"deadline_s": SHORTEST_S}, [term for term in spec.reward.judge_terms if term.judge.pool is None]
    terms = [replace(term, judge=term.judge.model_copy(update=once)) for term in asked]
    for judge in map(JudgeScorer, terms):
        try:
            for row in rows:
                whole = PromptRow(row["row"], row["data_source"], row["prompt"], row["ground_truth"], row["extra_info"])
                answer = Answer(row["answer"], f"{text_of(whole.prompt)}\n{row['answer']}")
                (scored,) = await judge.score(whole, [answer])
                _print({"row": row["row"], "field": judge.term.field, **_result(scored)})
        finally:
            await judge.close()


def _result(scored: Scored) -> dict[str, Any]:
    if scored.failure is not None:
        return {"failure": scored.failure}
    return {"score": scored.score, "details": scored.details}


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    """Scores what is on the standard input."""
    logs.configure("trial")
    first, *rows = (json.loads(line) for line in sys.stdin)
    try:
        spec = parse(first["spec"])
        if first.get("judges"):
            asyncio.run(ask_judges(spec, rows))
        else:
            asyncio.run(score(spec, [Term(**term) for term in first["terms"]], rows))
    except InvalidJob as error:
        _print({"mistakes": [asdict(mistake) for mistake in error.mistakes]})
    except MillraceError as error:
        _print({"mistakes": [asdict(Mistake("", error.what.removesuffix("."), error.fix))]})


if __name__ == "__main__":
    main()

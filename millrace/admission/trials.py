"""Checks that run in processes of their own: the reward function on a few rows, and the model in the backend.

What is run belongs to the services; only the names of their modules are known here.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from millrace.backends import BACKENDS
from millrace.data.row import PromptRow
from millrace.errors import Mistake, wrong_value
from millrace.rewards import BUILT_IN, BadOutcome, Term
from millrace.rewards.outcome import separate_rewards
from millrace.spec.job import JobSpec

REWARD = "services.rollout.trial"
START_S = 120.0
"""Seconds in which a process starts and imports what it needs."""
BUDGET_S = 60.0
"""Seconds for all rows of a built-in reward. What was not scored by then is not looked at."""
LONGEST_S = 600.0
SHOWN = 5
"""Rows whose mistakes are listed one by one; further ones are only counted."""


class RewardTrial:
    """Rows that are scored once with their own ground truth as the answer."""

    def __init__(self, spec: JobSpec, terms: Sequence[Term], section: str, rows: Sequence[PromptRow]) -> None:
        """`terms` are the functions of the reward, `section` the section of the job spec that has the rows."""
        self.rows = rows
        self.scored = 0
        """Rows whose ground truth the reward could use."""
        self.score: float | None = None
        """The reward of the first of `rows`."""
        self._spec, self._terms, self._section = spec, terms, section
        self._function = ", ".join(term.function for term in terms)
        self._function_field = f"{terms[0].field}.function" if len(terms) == 1 else "reward.functions"
        self._built_in = all(term.function in BUILT_IN for term in terms)

    def mistakes(self) -> Iterator[Mistake]:
        """Runs the trial; the mistakes that it finds."""
        calls = self._spec.reward.timeout_s * len(self.rows) * len(self._terms)
        limit_s = START_S + (min(calls, BUDGET_S) if self._built_in else min(calls, LONGEST_S - START_S))
        first = {"spec": self._spec.model_dump(mode="json"), "terms": [asdict(term) for term in self._terms]}
        results, ended = _run(REWARD, [first, *map(self._request, self.rows)], limit_s)
        failed = 0
        for result in sorted(results, key=lambda each: each.get("row", -1)):  # they come as they are scored
            if "mistakes" in result:
                yield from (Mistake(**each) for each in result["mistakes"])
                return
            found = list(self._of_row(result))
            failed += bool(found)
            self.scored += not found
            yield from found if failed <= SHOWN else ()
        if failed > SHOWN:
            yield Mistake(self._field, f"{failed - SHOWN} more rows fail like these", "correct them too.")
        if not results:
            fix = "try the function by itself; nothing slow belongs to its file's top level."
            yield wrong_value(self._function_field, self._function, f"could not be tried: {ended}", fix)

    def _request(self, row: PromptRow) -> dict[str, Any]:
        truth = row.ground_truth
        answer = _truth_as_answer(row)
        if any(term.function == "reasoning_gym" for term in self._terms):
            answer = f"<answer>{answer}</answer>"  # if its prompts ask for the answer
        common = {"row": row.index, "data_source": row.data_source, "answer": answer}
        return {**common, "ground_truth": truth, "extra_info": row.extra_info}

    @property
    def _field(self) -> str:
        return f"{self._section}.files" if self._built_in else self._function_field

    def _of_row(self, result: Mapping[str, Any]) -> Iterator[Mistake]:
        row = result["row"]
        if (failure := result.get("failure")) is None:
            if row == self.rows[0].index:
                self.score = result["score"]
            elsewhere = {each.name for each in self._spec.reward.functions if each.function is None}
            parts = [part for part in self._spec.reward.parts if part not in elsewhere]
            try:
                separate_rewards(result["score"], result["details"], parts)
            except BadOutcome as error:
                fix = "return it beside the score, or leave it out."
                yield wrong_value("reward.parts", parts, f"for row {row} the function {error}", fix)
        elif self._built_in:
            fix = "correct the row's reward_model.ground_truth, or name another reward in reward.function."
            yield Mistake(self._field, f"row {row}: the reward {self._function} cannot use it: it {failure}", fix)
        else:
            reason = f"for row {row}, with its ground truth as the answer, it failed: {failure}"
            yield wrong_value(
                self._function_field, self._function, reason, "correct the function: such groups are dropped."
            )


def ask_judges(spec: JobSpec, section: str, row: PromptRow, notes: list[str]) -> list[Mistake]:
    """Asks each judge behind a URL once, about a row of a section with its ground truth as the answer. Adds what it
    says to `notes`."""
    judges = [term.judge for term in spec.reward.judge_terms if term.judge.pool is None]
    for term in spec.reward.judge_terms:
        if term.judge.pool is not None:
            notes.append(f"{term.field}: is not asked: only replicas of a running job reach the pool {term.judge.pool}")
    if not judges:
        return []
    limit_s = START_S + sum(judge.timeout_s * (judge.retries + 1) for judge in judges)
    common = {"row": row.index, "data_source": row.data_source, "prompt": row.prompt, "extra_info": row.extra_info}
    asked = {**common, "ground_truth": row.ground_truth, "answer": _truth_as_answer(row)}
    results, ended = _run(REWARD, [{"spec": spec.model_dump(mode="json"), "judges": True}, asked], limit_s)
    mistakes = [] if results else [Mistake("reward.functions", f"the judges could not be asked: {ended}", "try again.")]
    for result in results:
        if "mistakes" in result:
            return [Mistake(**each) for each in result["mistakes"]]
        if (failure := result.get("failure")) is not None:
            reason = f"about row {row.index} of {section} the judge {failure}"
            mistakes.append(Mistake(result["field"], reason, "correct the judge, or start it."))
        else:
            notes.append(
                f"{result['field']}: gives {result['score']:g} to the ground truth of row {row.index} of {section}"
            )
    return mistakes


def _truth_as_answer(row: PromptRow) -> str:
    truth = row.ground_truth
    return truth if isinstance(truth, str) else "" if truth is None else json.dumps(truth, ensure_ascii=False)


def checks_models(spec: JobSpec) -> bool:
    """Whether the job's backend is installed here and checks models by building them."""
    backend = BACKENDS[spec.trainer.backend]
    return bool(backend.model_check) and backend.software.probe().ok


def model_mistakes(spec: JobSpec) -> list[Mistake]:
    """What is wrong with the models for the job's backend, which `checks_models`."""
    backend = BACKENDS[spec.trainer.backend]
    results, ended = _run(backend.model_check, [spec.model_dump(mode="json")], START_S)
    if not results:
        fix = "look at the model's config.json."
        return [wrong_value("model.path", spec.model.path, f"could not be built as a trainer builds it: {ended}", fix)]
    return [Mistake(**each) for each in results[-1]["mistakes"]]


def _run(module: str, lines: Sequence[Mapping[str, Any]], limit_s: float) -> tuple[list[dict[str, Any]], str]:
    """The lines of JSON that a module prints when it gets `lines`, and how it ended if that was not well. After
    `limit_s` it is killed with all that it started."""
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as errors:
        asked.writelines(json.dumps(line).encode() + b"\n" for line in lines)
        asked.seek(0)
        argv = [sys.executable, "-m", module]
        process = subprocess.Popen(argv, stdin=asked, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
        ended = ""
        try:
            printed, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, _ = process.communicate()
            ended = f"it took longer than {limit_s:g} s"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        if not ended and process.returncode:
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
            ended = f"its process ended with status {process.returncode}: {last[:300]}"
    whole = [line for line in printed.splitlines(keepends=True) if line.endswith(b"\n") and line.startswith(b"{")]
    return [json.loads(line) for line in whole], ended

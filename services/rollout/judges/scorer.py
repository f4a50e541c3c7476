"""A part of a reward that a judge scores, and how scores are read from what it says."""

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.contracts.v1 import fleet_pb2
from millrace.data.row import PromptRow
from millrace.errors import InvalidJob
from millrace.rewards import judge_template as template
from millrace.spec.pool import Judge, JudgeTerm
from services.rollout.judges.client import JudgeClient, JudgeDown, JudgeRefused, place_of
from services.rollout.pools.client import PoolClient
from services.rollout.scoring.scored import Answer, Scored

LONGEST_REPLY = 1000
"""Characters of a reply that samples show, from its end."""


class JudgeScorer:
    """Scores answers by asking a judge. `close` ends its connections."""

    def __init__(self, term: JudgeTerm, pools: Mapping[str, PoolClient] | None = None) -> None:
        """`pools`: a client of each pool of the job, by name. Raises InvalidJob if this host lacks the template's
        file or the variable with the key."""
        self.term = term
        try:
            self._template = _template(term.judge)
            self.client = JudgeClient(term.judge, term.name, place_of(term, pools or {}))
        except OSError as error:
            what = f"{term.field}.prompt_file: {term.judge.prompt_file}: cannot be read: {error.strerror}."
            raise InvalidJob(what, "put the file at this path on every replica's host.") from error

    async def score(self, row: PromptRow, answers: Sequence[Answer]) -> list[Scored]:
        """The scores of the answers to the row's prompt, in their order. Waits while the judge is down, at most for its
        deadline."""
        if self.term.scope == "group":
            return await self._score(self._group(row, answers), len(answers))
        found = await asyncio.gather(*(self._score(self._answer(row, each), 1) for each in answers))
        return [scored for (scored,) in found]

    def outage_message(self) -> fleet_pb2.JudgeOutage | None:
        """Reason that the coordinator gets while the judge is down and answers wait for it."""
        client = self.client
        if client.outage is None or not client.waiting:
            return None
        outage = client.outage
        return fleet_pb2.JudgeOutage(
            name=self.term.name, reason=outage.why, waiting=client.waiting, seconds=outage.seconds
        )

    async def close(self) -> None:
        await self.client.close()

    def _answer(self, row: PromptRow, answer: Answer) -> Mapping[str, str]:
        return {"answer": answer.text, "conversation": answer.conversation, **_shared(row)}

    def _group(self, row: PromptRow, answers: Sequence[Answer]) -> Mapping[str, str]:
        texts = template.numbered([each.text for each in answers])
        conversations = template.numbered([each.conversation for each in answers])
        return {"answers": texts, "conversations": conversations, **_shared(row)}

    async def _score(self, values: Mapping[str, str], count: int) -> list[Scored]:
        """The scores of the answers in one request."""
        judge, began = self.term.judge, time.perf_counter()
        messages = [{"role": "user", "content": template.filled(self._template, values)}]
        if judge.system:
            messages.insert(0, {"role": "system", "content": judge.system})
        failure = ""
        for _ in range(judge.retries + 1):
            try:
                reply = await self.client.ask(messages)
                scores = [scaled(number, judge.scale) for number in await self._numbers(reply, count)]
            except NoScore as error:
                failure = f"gave no score: {error}"
                continue
            except (JudgeDown, JudgeRefused) as error:
                failure = str(error)
                break
            seconds = time.perf_counter() - began
            return [Scored(score, {f"{self.term.name}_reply": reply[-LONGEST_REPLY:]}, seconds) for score in scores]
        return [Scored(None, {}, time.perf_counter() - began, failure)] * count

    async def _numbers(self, reply: str, count: int) -> list[float]:
        judge = self.term.judge
        if judge.json_field is not None:
            return scores_in_json(reply, judge.json_field, count)
        return await asyncio.to_thread(scores_by_pattern, reply, judge.pattern, count)


def _template(judge: Judge) -> str:
    """Raises OSError."""
    return judge.prompt if judge.prompt is not None else Path(judge.prompt_file or "").read_text(encoding="utf-8")


def _shared(row: PromptRow) -> Mapping[str, str]:
    truth = row.ground_truth
    text = truth if isinstance(truth, str) else "" if truth is None else json.dumps(truth, ensure_ascii=False)
    return {"prompt": template.text_of(row.prompt), "ground_truth": text}


LONGEST_SHOWN = 200
LARGEST_REPLY = 1 << 20
"""Characters of a reply that are looked at, from its end."""
MOST_OBJECTS = 200
"""Places of a reply at which a JSON object is looked for."""
PATTERN_S = 1.0
"""Seconds that a pattern may take for a reply."""


class NoScore(ValueError):
    """A reply holds no scores, or others than were asked for; the text says which."""


def scores_by_pattern(reply: str, pattern: str, count: int) -> list[float]:
    """The number in the first group of the last match of `pattern`, or in the match; for more than one answer those of
    all matches, in order. Raises NoScore."""
    import regex

    try:
        found = [
            match[1] if match.re.groups else match[0]
            for match in regex.finditer(pattern, reply[-LARGEST_REPLY:], timeout=PATTERN_S, concurrent=True)
        ]
    except TimeoutError as error:
        raise NoScore(f"judge.pattern took more than {PATTERN_S:g} s for {_short(reply)}") from error
    if not found:
        raise NoScore(f"judge.pattern matches nothing in {_short(reply)}")
    return _numbers(found[-1:] if count == 1 else found, count, reply)


def scores_in_json(reply: str, field: str, count: int) -> list[float]:
    """The number under `field` in the last JSON object of the reply that has it; for more than one answer a list of
    numbers. Raises NoScore."""
    values = [found[field] for found in _objects(reply[-LARGEST_REPLY:]) if field in found]
    if not values:
        raise NoScore(f"there is no JSON object with {field!r} in {_short(reply)}")
    value = values[-1]
    return _numbers(value if isinstance(value, list) else [value], count, reply)


def scaled(number: float, scale: Sequence[float] | None) -> float:
    """The number as a part of the way from the first to the second end of `scale`. Raises NoScore for one outside."""
    if scale is None:
        return number
    worst, best = scale
    if not min(worst, best) <= number <= max(worst, best):
        raise NoScore(f"{number:g} is not on the scale from {worst:g} to {best:g}")
    return (number - worst) / (best - worst)


def _objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects in a text, without those inside others."""
    decoder, found = json.JSONDecoder(), list[dict[str, Any]]()
    start = tried = 0
    while (start := text.find("{", start)) >= 0 and tried < MOST_OBJECTS:
        tried += 1
        try:
            value, start = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start += 1
        else:
            found.append(value)
    return found


def _numbers(values: Sequence[Any], count: int, reply: str) -> list[float]:
    if len(values) != count:
        raise NoScore(f"there are {len(values)} scores for {count} answers in {_short(reply)}")
    return [_number(value, reply) for value in values]


def _number(value: Any, reply: str) -> float:
    try:
        number = float(value) if isinstance(value, str | int | float) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise NoScore(f"{_short(str(value))} is not a number, in {_short(reply)}")
    return number


def _short(text: str) -> str:
    shown = text if len(text) <= LONGEST_SHOWN else "…" + text[-LONGEST_SHOWN:]
    return json.dumps(shown, ensure_ascii=False)

"""A part of a reward that a judge scores."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from millrace.contracts.v1 import fleet_pb2
from millrace.data.row import PromptRow
from millrace.errors import InvalidJob
from millrace.rewards import judge_template as template
from millrace.spec.pool import Judge, JudgeTerm
from services.rollout.judges.client import JudgeClient, JudgeDown, JudgeRefused
from services.rollout.judges.places import place_of
from services.rollout.judges.reply import NoScore, scaled, scores_by_pattern, scores_in_json
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

"""Scores groups in a pool of processes, while the engine generates.

A call that hangs, crashes, raises, needs too much memory or does not return a number costs only its own answer: the
pool kills the process if needed, starts another, and `Scored.failure` says what happened.
"""

import asyncio
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeVar

from millrace.data.row import PromptRow
from millrace.rewards.term import Term
from millrace.spec.model import Reward
from services.rollout.scoring.scored import Answer, Scored, Weighted, summed
from services.rollout.user_process.pool import START_TIMEOUT_S, ProcessPool
from services.rollout.user_process.process import Setup, UserProcess, WorkerDied, absolute

Found = TypeVar("Found")


@dataclass(frozen=True)
class RewardSetup(Setup):
    """The first message to a process that scores; `function` has the names of all functions, for messages."""

    terms: Sequence[Term] = ()
    """The functions of the reward; a call names one by its place."""
    timeout_s: float = 30.0
    """Seconds of a call."""

    def message(self) -> dict[str, Any]:
        terms = [replace(term, function=absolute(term.function)) for term in self.terms]
        return asdict(replace(self, terms=terms))


class ScoringPool(ProcessPool):
    """`workers` processes that each have the reward's functions loaded. Use it between `start` and `close`."""

    def __init__(
        self,
        terms: Sequence[Term],
        *,
        workers: int = 2,
        timeout_s: float = 30.0,
        memory_mb: int = 2048,
        network: bool = False,
        required: bool = False,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """`terms`: the functions; without any there are no processes. `timeout_s` limits one call, `start_timeout_s`
        the loading of the functions. `memory_mb`: what one process and all that it starts may allocate beyond the size
        of Python itself. Without `network` the functions cannot reach any network. `required`: a machine that does not
        give every boundary is refused."""
        names = ", ".join(dict.fromkeys(term.function for term in terms))
        super().__init__(
            RewardSetup(names, {}, memory_mb, network, required, terms, timeout_s), workers, start_timeout_s
        )
        self.terms = terms
        self._timeout_s = timeout_s

    @classmethod
    def of_job(cls, reward: Reward, terms: Sequence[Term], workers: int) -> "ScoringPool":
        """A pool for the functions `terms` that obeys the limits of a job's `reward`."""
        return cls(
            terms,
            workers=workers,
            timeout_s=reward.timeout_s,
            memory_mb=reward.memory_mb,
            network=reward.network,
            required=reward.isolation == "required",
        )

    async def start(self) -> None:
        if self.terms:
            await super().start()

    async def score_group(
        self, data_source: str, answers: Sequence[str], ground_truth: Any, extra_info: Mapping[str, Any]
    ) -> list[Scored]:
        """Scores the answers of one group, in their order, on as many processes as are free.

        Raises Unavailable if the pool is closed, or no process can be started any more.
        """
        return summed(self.terms, await self.scores_by_term(data_source, answers, ground_truth, extra_info))

    async def scores_by_term(
        self, data_source: str, answers: Sequence[str], ground_truth: Any, extra_info: Mapping[str, Any]
    ) -> list[list[Scored]]:
        """The scores of the answers by each function. Raises as `score_group`."""
        rest = {"data_source": data_source, "ground_truth": ground_truth, "extra_info": dict(extra_info)}
        return await _every(self._score_term(number, answers, rest) for number in range(len(self.terms)))

    async def _score_term(self, number: int, answers: Sequence[str], rest: Mapping[str, Any]) -> list[Scored]:
        """The scores by one function: of all answers in one call, or of each in a call of its own."""
        batches = [answers] if self.terms[number].scope == "group" else [[answer] for answer in answers]
        calls = (self._score({"term": number, "answers": batch, **rest}) for batch in batches if batch)
        return [scored for of_call in await _every(calls) for scored in of_call]

    async def _score(self, arguments: Mapping[str, Any]) -> list[Scored]:
        """The scores of the answers of one call. A failure is that of each of them."""
        worker = await self._take()
        usable = False
        try:
            scored, usable = await self._ask(worker, arguments)
            return scored
        finally:
            self._give_back(worker, usable=usable)

    async def _ask(self, worker: UserProcess, arguments: Mapping[str, Any]) -> tuple[list[Scored], bool]:
        """The scores, and whether the process can be used again."""
        start = time.perf_counter()

        def failed(why: str, seconds: float | None = None) -> list[Scored]:
            elapsed = time.perf_counter() - start if seconds is None else seconds
            return [Scored(None, {}, elapsed, why)] * len(arguments["answers"])

        try:
            reply = await worker.ask(arguments, self._timeout_s)
        except TimeoutError:
            return failed(f"timeout after {self._timeout_s:g} s"), False
        except WorkerDied as death:
            return failed(str(death)), False
        seconds = reply["seconds"]
        if reply.get("out_of_memory"):
            return failed(f"killed: memory limit {self._setup.memory_mb} MB", seconds), False
        if (failure := reply.get("failure")) is not None:
            return failed(failure, seconds), not reply.get("spoiled")
        if len(found := reply["outcomes"]) != len(arguments["answers"]):
            return failed("broke the protocol: its answer has another number of scores", seconds), False
        return [Scored(each["score"], each["details"], seconds) for each in found], True


async def _every(calls: Iterable[Coroutine[Any, Any, Found]]) -> list[Found]:
    """All results, in order. The first exception is raised when all calls have ended."""
    found: list[Found] = []
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found


class TermScorer(Protocol):
    """A part of the reward that no function of the job gives."""

    @property
    def term(self) -> Weighted:
        """Name and weight of its score."""

    async def score(self, row: PromptRow, answers: Sequence[Answer]) -> list[Scored]:
        """The scores of the answers to the row's prompt, in their order. It may wait for another service. Raises
        Unavailable if that fails: the group is generated again."""


class RewardScorer:
    """Scores groups by the job's functions and by `others`."""

    def __init__(self, functions: ScoringPool, others: Sequence[TermScorer] = ()) -> None:
        self._functions = functions
        self._others = others

    async def score_group(self, row: PromptRow, answers: Sequence[Answer]) -> list[Scored]:
        """The rewards of the answers to one prompt, in their order. Raises Unavailable."""
        if not answers:
            return []
        functions, texts = self._functions, [answer.text for answer in answers]
        by_functions, by_others = await asyncio.gather(
            functions.scores_by_term(row.data_source, texts, row.ground_truth, row.extra_info),
            asyncio.gather(*(other.score(row, answers) for other in self._others)),
        )
        terms: list[Weighted] = [*functions.terms, *(other.term for other in self._others)]
        return summed(terms, [*by_functions, *by_others])

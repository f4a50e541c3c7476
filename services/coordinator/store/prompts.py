"""Prompts in Redis: the queue, the leases, the ledger and the groups of one job and purpose.

The queue is a stream with the consumer group `replicas`; an entry is a prompt, its consumer the member that holds the
lease, its idle time the lease's age. Entries whose holder lost them belong to the consumer `nobody` and are leased
first. The training data's prompts are the job's ledger; evaluation has prompts of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from redis.exceptions import ResponseError

from millrace.errors import Fenced, InvalidState
from millrace.ids import Fence, JobId, LeaseId, MemberId, PromptId
from millrace.rest import LedgerView
from services.coordinator.state.group import Summary
from services.coordinator.state.ledger import Counts
from services.coordinator.store.connection import TIMEOUT_S, Connection, text
from services.coordinator.store.jobs import key

UNDONE_AT_ONCE = 1000
"""Prompts that one command takes back in a rewind: others wait for it."""
ANSWERS_KEPT_S = 900
"""How long the answer to a repeated Complete is remembered."""

PARTS = (
    *("queue", "fence", "leased", "groups", "summaries", "generated", "waiting", "notes"),
    *("state", "counts", "settled", "reason", "reasons"),
)
"""The keys of one ledger."""


class Purpose(StrEnum):
    TRAIN = "train"
    EVALUATION = "evaluation"


@dataclass(frozen=True)
class Draft:
    """A prompt before it is issued."""

    prompt_id: PromptId
    payload: bytes
    """The serialized Lease message, without its lease."""
    reason: str = ""
    """Why it is dropped at once: its row cannot be used."""


@dataclass(frozen=True)
class Claim:
    """A lease that was just given: `payload` is the serialized Lease message of its prompt."""

    lease_id: LeaseId
    fence: Fence
    payload: bytes


@dataclass(frozen=True)
class Refusals:
    """How many answers in a row brought no group, and what the last one said."""

    in_a_row: int
    last: str


class Prompts:
    def __init__(self, connection: Connection, job_id: JobId, purpose: Purpose) -> None:
        self._redis = connection
        self._job = key(job_id)
        self._base = f"{self._job}:{purpose}"
        self._prefix = "t" if purpose is Purpose.TRAIN else "e"

    # From the data to a lease.

    # `step` is always the one that a prompt belongs to: the next to be trained. A rewind undoes what it led to.

    async def issue(self, drafts: Sequence[Draft], step: int, cursor: tuple[int, int] | None = None) -> bool:
        """Queues new prompts and moves the data cursor from `cursor[0]` to `cursor[1]`. False where it had moved."""
        arguments = [*(cursor or ("", "")), step, *_flat(drafts)]
        return int(await self._redis.run("issue", [self._base, self._job], arguments)) >= 0

    async def waiting(self, count: int) -> list[PromptId]:
        """Prompts that are to be queued again, rewound or without their group; those of earlier steps in front."""
        return [PromptId(text(p)) for p in await self._redis.do("ZRANGE", f"{self._base}:waiting", 0, count - 1)]

    async def reissue(self, drafts: Sequence[Draft], step: int) -> None:
        """Queues prompts that wait to be issued again."""
        await self._redis.run("reissue", [self._base], [step, *_flat(drafts)])

    async def lease(self, member: MemberId, count: int, lineage: int) -> list[Claim]:
        """None where the job is in another lineage than the member's weights by now."""
        claims = await self._redis.run("lease", [self._base, self._job], [member, count, lineage])
        return [Claim(LeaseId(self._prefix + text(entry)), Fence(fence), payload) for entry, fence, payload in claims]

    async def extend(self, member: MemberId, leases: Sequence[tuple[LeaseId, Fence]]) -> set[LeaseId]:
        """Starts the leases' deadlines anew; answers those that the member has lost."""
        lost = await self._redis.run("extend", [self._base], [member, *self._entries(leases)])
        return {LeaseId(self._prefix + text(entry)) for entry in lost}

    # From a lease back to the queue.

    async def release(self, leases: Sequence[tuple[LeaseId, Fence]]) -> list[PromptId]:
        return _prompts(await self._redis.run("release", [self._base], self._entries(leases)))

    async def expire(self, lease_s: float) -> list[PromptId]:
        seconds, micros = await self._redis.do("TIME")
        until = seconds + micros / 1e6 + TIMEOUT_S
        return _prompts(await self._redis.run("expire", [self._base], [int(lease_s * 1000), until]))

    async def take_back(self, member: MemberId) -> list[PromptId]:
        return _prompts(await self._redis.run("take_back", [self._base], [member]))

    # From a lease to a group or a reason.

    async def complete(self, lease_id: LeaseId, fence: Fence, group: bytes, summary: Summary) -> bool:
        """Answers a lease with its group. False where the same answer came before. Raises Fenced, InvalidState."""
        return await self._answer(lease_id, fence, summary.prompt_id, "complete", 0, group, summary.to_json())

    async def refuse(self, lease_id: LeaseId, fence: Fence, step: int, reason: str) -> bool:
        """Answers a lease with the reason why there is no group; the part before `:` is kept on the ledger."""
        return await self._answer(lease_id, fence, "", "refuse", step, b"", reason[:2000] or "unknown")

    async def _answer(
        self,
        lease_id: LeaseId,
        fence: Fence,
        prompt: str,
        move: Literal["complete", "refuse"],
        step: int,
        body: bytes,
        detail: str,
    ) -> bool:
        entry = lease_id.removeprefix(self._prefix)
        arguments = [entry, fence, prompt, move, step, body, detail, ANSWERS_KEPT_S]
        outcome = text(await self._redis.run("complete", [self._base], arguments))
        if outcome == "fenced":
            what = (
                f"lease {lease_id} with fence {fence} is over: it expired, or its prompt has passed to another member."
            )
            raise Fenced(what, "throw its group away; nothing is lost.")
        if outcome == "mismatch":
            raise InvalidState(f"lease {lease_id} is not for prompt {prompt}.", "answer each lease with its own group.")
        return outcome == "done"

    # From a group to the end.

    async def drop(self, prompts: Sequence[PromptId], step: int, reason: str) -> int:
        """Gives up generated prompts; answers how many."""
        return int(await self._redis.run("drop", [self._base], [step, reason, *prompts])) if prompts else 0

    async def regenerate(self, prompts: Sequence[PromptId], step: int) -> int:
        """Throws the groups of generated prompts away, which wait to be issued again; answers how many."""
        return int(await self._redis.run("regenerate", [self._base], [step, *prompts])) if prompts else 0

    async def train(self, prompts: Sequence[PromptId], step: int, reward: float, row: str, samples: list[str]) -> bool:
        """Marks `step` as trained on `prompts`, all in one go. False where it was marked before."""
        arguments = [step, reward, row, len(samples), *samples, *prompts]
        return bool(await self._redis.run("train", [self._base, self._job], arguments))

    async def rewind(self, to: int) -> int:
        """Undoes what came after step `to`; answers how many prompts wait to be issued again."""
        await self._redis.run("rewind", [self._base, self._job], [to])
        await self.undo()
        return int(await self._redis.do("ZCARD", f"{self._base}:waiting"))

    async def undo(self) -> bool:
        """Finishes a rewind that was begun, by whomever; until then nothing else is done with the ledger. False where
        there was none."""
        found = False
        while await self._redis.run("undo", [self._base], [UNDONE_AT_ONCE]):
            found = True
        return found

    async def close(self, step: int, reason: str) -> int:
        """Drops what is in flight and deletes queue and groups; answers how many were dropped."""
        return int(await self._redis.run("close", [self._base], [step, reason]))

    async def forget(self) -> None:
        """Deletes this ledger."""
        await self._redis.do("DEL", *(f"{self._base}:{part}" for part in PARTS))

    # Looking.

    async def counts(self) -> Counts:
        fields = await self._redis.do("HGETALL", f"{self._base}:counts")
        return Counts(**{name.decode(): int(value) for name, value in fields.items()})

    async def view(self) -> LedgerView:
        commands = (("HGETALL", f"{self._base}:counts"), ("HGETALL", f"{self._base}:reasons"))
        counts, reasons = await self._redis.together(*commands)
        found = Counts(**{name.decode(): int(value) for name, value in counts.items()})
        return LedgerView(
            issued=found.issued,
            queued=found.queued,
            leased=found.leased,
            generated=found.generated,
            trained=found.trained,
            dropped=found.dropped,
            reasons={name.decode(): int(value) for name, value in reasons.items() if int(value)},
        )

    async def refusals(self) -> Refusals:
        in_a_row, last = await self._redis.do("HMGET", f"{self._base}:notes", "refused_in_a_row", "last_refusal")
        return Refusals(int(in_a_row or 0), text(last))

    async def generated(self) -> list[PromptId]:
        """Prompts whose groups wait to be trained, in the order in which they were completed."""
        return [PromptId(text(p)) for p in await self._redis.do("ZRANGE", f"{self._base}:generated", 0, -1)]

    async def summaries(self, prompts: Sequence[PromptId]) -> list[Summary]:
        """Of those prompts that still have a group."""
        if not prompts:
            return []
        found = await self._redis.do("HMGET", f"{self._base}:summaries", *prompts)
        return [Summary.from_json(summary) for summary in found if summary is not None]

    async def group(self, prompt: PromptId) -> bytes | None:
        """The serialized Group message; None where there is none. One at a time: it may be tens of megabytes."""
        found: bytes | None = await self._redis.read("HGET", f"{self._base}:groups", prompt)
        return found

    async def held(self) -> dict[MemberId, int]:
        """Leases by the member that holds them."""
        try:
            pending = await self._redis.do("XPENDING", f"{self._base}:queue", "replicas")
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            return {}  # there is no queue: nothing was issued yet, or the ledger is closed
        consumers = pending["consumers"] if pending else []
        return {MemberId(text(c["name"])): int(c["pending"]) for c in consumers if c["name"] != b"nobody"}

    def _entries(self, leases: Sequence[tuple[LeaseId, Fence]]) -> list[str | int]:
        return [part for lease_id, fence in leases for part in (lease_id.removeprefix(self._prefix), fence)]


def purpose_of(lease_id: LeaseId) -> Purpose:
    return Purpose.EVALUATION if lease_id.startswith("e") else Purpose.TRAIN


def _flat(drafts: Sequence[Draft]) -> list[str | bytes]:
    return [part for draft in drafts for part in (draft.prompt_id, draft.payload, draft.reason[:2000])]


def _prompts(found: Sequence[bytes]) -> list[PromptId]:
    return [PromptId(text(prompt)) for prompt in found]

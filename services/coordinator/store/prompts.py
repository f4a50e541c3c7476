"""Prompts in Redis: the queue, the leases, the ledger and the groups of one job and purpose.

The queue is a stream with the consumer group `replicas`. An entry is a QueuedPrompt, its consumer is the member that
holds the lease, and its idle time is the age of the lease. Entries whose holder lost them belong to the consumer
`nobody` and are leased first. Each purpose has its own queue and ledger.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from types import MappingProxyType

from millrace.drops import Drop, DropReason
from millrace.errors import Fenced, InvalidState
from millrace.ids import Fence, JobId, LeaseId, MemberId, PromptId, Purpose, Version
from millrace.rest import LedgerView
from millrace.telemetry.metrics.histograms import STEPS_KEPT
from services.coordinator.state.group import GroupSummary
from services.coordinator.state.lease import Claim, Draft, LeaseRef, QueuedPrompt
from services.coordinator.state.ledger import Counts
from services.coordinator.store.connection import TIMEOUT_S, Connection, text
from services.coordinator.store.jobs import key

UNDONE_AT_ONCE = 1000
"""Prompts that one command takes back in a rewind. Other commands wait for it."""
CLOSED_AT_ONCE = 1000
"""Prompts that one command drops as the ledger ends. Other commands wait for it."""
ANSWERS_KEPT_S = 900
"""How long the answer to a repeated Complete is remembered."""
MOST_PARTS_BYTES = 64 << 20
"""What is kept of one lease. What comes beyond is generated again if the lease is lost."""
LEASED_BYTES = 32 << 20
"""Bytes of prompts and their parts after which one call leases no more of them."""
LONGEST_DETAIL = 2000
"""Characters of a drop's detail that are kept."""

PARTS = (
    *("queue", "fence", "leased", "parts", "groups", "summaries", "generated", "waiting", "notes", "deaths"),
    *("state", "counts", "settled", "reason", "reasons"),
)
"""The keys of one ledger. Those of the parts of single entries are besides."""
NO_PARTS: Mapping[LeaseRef, bytes] = MappingProxyType({})


@dataclass(frozen=True)
class Refusals:
    """How many answers in a row gave no group, and the last of them."""

    in_a_row: int
    last: Drop | None


@dataclass(frozen=True)
class Rewound:
    """What a rewind left."""

    waiting: int
    """Prompts that wait to be issued again."""
    kept: int
    """Complete groups that can still be trained."""
    discarded: int
    """Complete groups of versions that are gone. Their prompts are among those that wait."""


class Outcome(StrEnum):
    """What a script says to the answer of a lease."""

    DONE = "done"
    AGAIN = "again"
    """The same answer came before."""
    FENCED = "fenced"
    """The lease is over."""
    MISMATCH = "mismatch"
    """The group is of another prompt."""


class Prompts:
    """The prompts of one job and purpose. `step` is always the one that a prompt belongs to: the next to be trained. A
    rewind takes back what was settled in later steps."""

    def __init__(self, connection: Connection, job_id: JobId, purpose: Purpose) -> None:
        self._redis = connection
        self._job = key(job_id)
        self._purpose = purpose
        self._base = f"{self._job}:{purpose}"

    # From the data to a lease.

    async def issue(self, drafts: Sequence[Draft], step: int, cursor: tuple[int, int] | None = None) -> bool:
        """Queues new prompts and moves the data cursor from `cursor[0]` to `cursor[1]`. False if it had moved."""
        arguments = [*(cursor or ("", "")), step, *_encoded(drafts)]
        return int(await self._redis.run("issue", [self._base, self._job], arguments)) >= 0

    async def waiting(self, count: int) -> list[PromptId]:
        """Up to `count` prompts that are to be issued again: rewound, or without their group. Those of earlier steps
        come first."""
        return [PromptId(text(p)) for p in await self._redis.do("ZRANGE", f"{self._base}:waiting", 0, count - 1)]

    async def reissue(self, drafts: Sequence[Draft], step: int) -> None:
        """Queues prompts that wait to be issued again."""
        await self._redis.run("reissue", [self._base], [step, *_encoded(drafts)])

    async def lease(self, member: MemberId, count: int, lineage: int, share: float = 1.0) -> list[Claim] | None:
        """Up to `count` leases for the member, and up to its `share` of the queued prompts, rounded up; none if the
        job has another lineage than the member's weights. None while the member is held back: it has a prompt that is
        leased alone, as others died with it."""
        ledgers = [f"{self._job}:{purpose}" for purpose in Purpose]
        claims = await self._redis.run(
            "lease", [self._base, self._job, *ledgers], [member, count, lineage, LEASED_BYTES, share]
        )
        if isinstance(claims, bytes):
            return None
        return [
            Claim(LeaseRef(self._purpose, LeaseId(text(entry)), Fence(fence)), QueuedPrompt.decode(fields), parts)
            for entry, fence, fields, parts in claims
        ]

    async def extend(
        self, member: MemberId, leases: Sequence[LeaseRef], parts: Mapping[LeaseRef, bytes] = NO_PARTS
    ) -> set[LeaseRef]:
        """Restarts the deadlines of the leases, and keeps their serialized `parts`; answers the leases that the member
        has lost."""
        arguments = [member, MOST_PARTS_BYTES, *_entries(leases, parts)]
        lost = {text(entry) for entry in await self._redis.run("extend", [self._base], arguments)}
        return {lease for lease in leases if lease.id in lost}

    # From a lease back to the queue. Each answers the prompts that are queued again.

    async def release(self, leases: Sequence[LeaseRef], parts: Mapping[LeaseRef, bytes] = NO_PARTS) -> list[PromptId]:
        """Ends the leases, whose serialized `parts` are kept."""
        return _prompts(await self._redis.run("release", [self._base], [MOST_PARTS_BYTES, *_entries(leases, parts)]))

    async def expire(self, lease_s: float) -> list[PromptId]:
        """Ends the leases that were not extended for `lease_s`."""
        seconds, micros = await self._redis.do("TIME")
        until = seconds + micros / 1e6 + TIMEOUT_S
        return _prompts(await self._redis.run("expire", [self._base], [int(lease_s * 1000), until]))

    async def take_back(self, member: MemberId, step: int, died: str = "") -> tuple[list[PromptId], list[PromptId]]:
        """Ends all leases of the member; answers the prompts that are queued again, and those that are dropped because
        one member too many died with them. `died`: how it died; empty if it did not."""
        queued, dropped = await self._redis.run("take_back", [self._base], [member, died[:LONGEST_DETAIL], step])
        return _prompts(queued), _prompts(dropped)

    # From a lease to a group or a reason.

    async def complete(self, lease: LeaseRef, group: bytes, summary: GroupSummary) -> bool:
        """Answers a lease with its serialized group. False if the same answer came before. Raises Fenced, and
        InvalidState for the group of another prompt."""
        arguments = [lease.id, lease.fence, summary.prompt_id, group, summary.to_json(), ANSWERS_KEPT_S]
        keys = [self._base, f"{self._job}:deaths"]
        outcome = Outcome(text(await self._redis.run("complete", keys, arguments)))
        if outcome is Outcome.MISMATCH:
            what = f"lease {lease.id} is not for prompt {summary.prompt_id}."
            raise InvalidState(what, "answer each lease with its own group.")
        return _is_new(lease, outcome)

    async def refuse(self, lease: LeaseRef, step: int, drop: Drop) -> bool:
        """Answers a lease with the reason why there is no group. False if the same answer came before. Raises
        Fenced."""
        detail = drop.detail[:LONGEST_DETAIL]
        arguments = [lease.id, lease.fence, step, drop.reason, detail, ANSWERS_KEPT_S]
        return _is_new(lease, Outcome(text(await self._redis.run("refuse", [self._base], arguments))))

    # From a group to the end.

    async def drop(self, prompts: Sequence[PromptId], step: int, reason: DropReason) -> int:
        """Drops generated prompts; answers how many."""
        return int(await self._redis.run("drop", [self._base], [step, reason, *prompts])) if prompts else 0

    async def regenerate(self, prompts: Sequence[PromptId], step: int) -> int:
        """Deletes the groups of generated prompts, which wait to be issued again; answers how many."""
        return int(await self._redis.run("regenerate", [self._base], [step, *prompts])) if prompts else 0

    async def train(
        self,
        prompts: Sequence[PromptId],
        step: int,
        reward: float,
        row: str,
        samples: list[str],
        kept: int,
        histograms: str = "{}",
    ) -> bool:
        """Marks `step` as trained on `prompts`, all at once. False if it was marked before. `kept`: most samples
        that the job keeps."""
        arguments = [step, reward, row, histograms, STEPS_KEPT, len(samples), kept, *samples, *prompts]
        return bool(await self._redis.run("train", [self._base, self._job], arguments))

    async def rewind(self, to: Version) -> Rewound:
        """Takes back what came after step `to`. Complete groups stay if all of their tokens are of versions up
        to `to`: those weights are valid as before. Later versions are made anew, with other weights."""
        complete = await self.summaries((await self.generated())[0])
        kept = [group.prompt_id for group in complete if group.newest_version <= to]
        stay, go = await self._redis.run("rewind", [self._base, self._job], [to, *kept])
        await self.undo()
        return Rewound(int(await self._redis.do("ZCARD", f"{self._base}:waiting")), int(stay), int(go))

    async def undo(self) -> bool:
        """Finishes a rewind that was begun, perhaps by an earlier process. Until then nothing else may be done with the
        ledger. False if no rewind was in progress."""
        found = False
        while await self._redis.run("undo", [self._base], [UNDONE_AT_ONCE]):
            found = True
        return found

    async def close(self, step: int, reason: DropReason) -> int:
        """Drops what is in flight and deletes queue and groups; answers how many were dropped. Other commands run
        between its parts, so nothing may issue prompts any more."""
        return await self._drop_all(step, reason)

    async def prepare_close(self, step: int, reason: DropReason) -> int:
        """Drops what is in flight before a transition of the job that ends the ledger, which then has little to do;
        answers how many were dropped. If there is no such transition, `undo` takes them back. Nothing may issue prompts
        any more."""
        return await self._drop_all(step, reason, step - 1)

    async def _drop_all(self, step: int, reason: DropReason, *back_to: int) -> int:
        dropped = ended = 0
        while not ended:
            some, ended = await self._redis.run("close", [self._base], [step, reason, CLOSED_AT_ONCE, *back_to])
            dropped += some
        return dropped

    async def forget(self) -> None:
        """Deletes this ledger."""
        entries = [f"parts:{text(entry)}" for entry in await self._redis.do("HKEYS", f"{self._base}:parts")]
        await self._redis.do("DEL", *(f"{self._base}:{part}" for part in (*PARTS, *entries)))

    # Reading.

    async def counts(self) -> Counts:
        fields = await self._redis.do("HGETALL", f"{self._base}:counts")
        return Counts(**{name.decode(): int(value) for name, value in fields.items()})

    async def view(self) -> LedgerView:
        commands = (("HGETALL", f"{self._base}:counts"), ("HGETALL", f"{self._base}:reasons"))
        counts, reasons = await self._redis.together(*commands)
        found = Counts(**{name.decode(): int(value) for name, value in counts.items()})
        return LedgerView(
            **asdict(found),
            reasons={DropReason(name.decode()): int(value) for name, value in reasons.items() if int(value)},
        )

    async def refusals(self) -> Refusals:
        names = ("refused_in_a_row", "last_refusal_reason", "last_refusal_detail")
        in_a_row, reason, detail = await self._redis.do("HMGET", f"{self._base}:notes", *names)
        return Refusals(int(in_a_row or 0), None if reason is None else Drop(DropReason(text(reason)), text(detail)))

    async def last_failure(self) -> str:
        """What the reward or the environment failed with last; empty if it did not."""
        return text(await self._redis.do("HGET", f"{self._base}:notes", "last_failure"))

    async def generated(self, after: int = 0) -> tuple[list[PromptId], int]:
        """Prompts whose groups wait to be trained, of those that were completed after the first `after`, in the order
        of completion; and `after` for the next call."""
        name = f"{self._base}:generated"
        found = await self._redis.do("ZRANGE", name, f"({after}", "+inf", "BYSCORE", "WITHSCORES")
        return [PromptId(text(p)) for p in found[::2]], int(found[-1]) if found else after

    async def unanswered(self, count: int) -> list[LeaseId]:
        """The first `count` entries of the queue that have no answer, leased or not, in the order of issue."""
        return [LeaseId(text(e)) for e in await self._redis.run("unanswered", [self._base], [count])]

    async def summaries(self, prompts: Sequence[PromptId]) -> list[GroupSummary]:
        """Summaries of those of the prompts that still have a group."""
        if not prompts:
            return []
        found = await self._redis.do("HMGET", f"{self._base}:summaries", *prompts)
        return [GroupSummary.from_json(summary) for summary in found if summary is not None]

    async def group(self, prompt: PromptId) -> bytes | None:
        """The serialized Group message; None if there is none. One at a time: it may have tens of megabytes."""
        found: bytes | None = await self._redis.read("HGET", f"{self._base}:groups", prompt)
        return found

    async def holds_any(self, member: MemberId) -> bool:
        """Whether the member holds a lease."""
        return bool(await self._redis.run("holds_any", [self._base], [member]))

    async def held(self) -> dict[MemberId, int]:
        """Number of leases that each member holds."""
        found = await self._redis.run("held", [self._base])
        return {MemberId(text(member)): int(count) for member, count in zip(found[::2], found[1::2], strict=True)}


def _is_new(lease: LeaseRef, outcome: Outcome) -> bool:
    if outcome is Outcome.FENCED:
        what = f"lease {lease.id} with fence {lease.fence} is over: it expired, or another member holds its prompt."
        raise Fenced(what, "throw its group away; nothing is lost.")
    return outcome is Outcome.DONE


def _entries(leases: Sequence[LeaseRef], parts: Mapping[LeaseRef, bytes]) -> list[str | int | bytes]:
    return [each for lease in leases for each in (lease.id, lease.fence, parts.get(lease, b""))]


def _encoded(drafts: Sequence[Draft]) -> list[str | bytes | int]:
    """Arguments of the scripts, as `each_draft` in ledger.lua reads them."""
    parts: list[str | bytes | int] = []
    for draft in drafts:
        if isinstance(draft, QueuedPrompt):
            fields = draft.encode()
            parts += [draft.prompt_id, "", "", len(fields), *fields]
        else:
            parts += [draft.prompt_id, draft.drop.reason, draft.drop.detail[:LONGEST_DETAIL], 0]
    return parts


def _prompts(found: Sequence[bytes]) -> list[PromptId]:
    return [PromptId(text(prompt)) for prompt in found]

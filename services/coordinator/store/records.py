"""A job's records in Redis: events, step metrics, samples, the batch in progress, publications, checkpoints."""

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.events import Event, Payload
from millrace.ids import JobId
from millrace.rest import SampleView, StepMetrics
from services.coordinator.state.group import GroupSummary
from services.coordinator.store.connection import Connection, text
from services.coordinator.store.jobs import event_parts, key

EVENTS_KEPT = 10_000
SAMPLES_PAGE = 100
"""Samples that are read at once in search of those of some steps."""
SPANS_KEPT_S = 24 * 3600
"""A job's spans are kept for this long after the last of them came."""
TOKEN_RECORDS = 1000
TOKEN_BYTES_KEPT = 8 << 20
"""Most records of tokens of one job, and most bytes if all are as large as the newest."""
TOKENS_KEPT_S = 3 * 24 * 3600
"""They are kept for this long after the last of them came."""
PARTS = (
    "events",
    "metrics",
    "histograms",
    "series",
    "metric_keys",
    "samples",
    "tokens",
    "batch",
    "kept",
    "publications",
    "checkpoints",
    "spans",
)
"""The keys of one job's records."""


@dataclass(frozen=True)
class TokenRecord:
    """What is kept of the tokens of one group. `observe/tokens.py` packs and reads it."""

    group: bytes
    trained: bytes = b""
    """What the trainer reported of these tokens; empty if it reported nothing."""


@dataclass(frozen=True)
class StoredBatch:
    """The batch of the step in progress."""

    step: int
    groups: list[GroupSummary]
    waited_s: float
    """Seconds spent waiting for them."""
    sizes: list[int]
    """Groups of each part in which the trainer gets them."""
    complete: bool
    """Whether all groups of the step are there."""


class Records:
    """The records of one job."""

    def __init__(self, connection: Connection, job_id: JobId) -> None:
        self._redis = connection
        self._job = key(job_id)

    # The event log.

    async def add_event(self, data: Payload, message: str) -> str:
        """Adds an event; answers its id."""
        parts = event_parts(data, message)
        added = await self._redis.do("XADD", f"{self._job}:events", "MAXLEN", "~", EVENTS_KEPT, "*", *parts)
        return text(added)

    async def events(self, after: str = "", count: int = 500) -> list[Event]:
        """Up to `count` events after the id `after`, in order."""
        start = f"({after}" if after else "-"
        found = await self._redis.do("XRANGE", f"{self._job}:events", start, "+", "COUNT", count)
        return [_event(text(identity), fields) for identity, fields in found]

    async def event_before(self, count: int) -> str:
        """Id of the event before the `count` newest ones; empty if there are no more than those."""
        found = await self._redis.do("XREVRANGE", f"{self._job}:events", "+", "-", "COUNT", count + 1)
        return text(found[-1][0]) if len(found) > count else ""

    # Step metrics, one row a step.

    async def row(self, step: int) -> dict[str, float] | None:
        """The metrics of one step; None if it has none yet."""
        found = await self._redis.do("HGET", f"{self._job}:metrics", step)
        return None if found is None else StepMetrics.model_validate_json(found).values

    async def set_rows(self, *rows: StepMetrics) -> None:
        """Stores at least one row, each in place of the one that its step had."""
        parts = (part for row in rows for part in (row.step, row.model_dump_json()))
        await self._redis.do("HSET", f"{self._job}:metrics", *parts)

    async def rows(self, after: int, last: int) -> list[StepMetrics]:
        """The rows of the steps after `after` up to `last`."""
        steps = range(after + 1, last + 1)
        found = await self._redis.do("HMGET", f"{self._job}:metrics", *steps) if steps else []
        return [StepMetrics.model_validate_json(row) for row in found if row is not None]

    async def histograms(self, steps: Sequence[int]) -> list[bytes | None]:
        """The histograms of each of the steps, as observe/histograms.py stores them; None if none are kept."""
        found: list[bytes | None] = await self._redis.read("HMGET", f"{self._job}:histograms", *steps) if steps else []
        return found

    # Points of curves, each for several steps (observe/series.py).

    async def series(self, names: Sequence[str]) -> list[bytes | None]:
        """The points of these names; None for those that are not kept."""
        found: list[bytes | None] = await self._redis.read("HMGET", f"{self._job}:series", *names) if names else []
        return found

    async def set_series(self, kept: Mapping[str, str]) -> None:
        """Keeps points. The name of each ends with a colon and its last step; a rewind to a step before it deletes
        it."""
        await self._redis.do("HSET", f"{self._job}:series", *(part for pair in kept.items() for part in pair))

    async def add_metric_keys(self, keys: Collection[str]) -> None:
        """Notes that steps of the job have these metrics."""
        if keys:
            await self._redis.do("SADD", f"{self._job}:metric_keys", *keys)

    async def metric_keys(self) -> set[str]:
        """The metrics that were noted."""
        return {text(key) for key in await self._redis.do("SMEMBERS", f"{self._job}:metric_keys")}

    # Samples.

    async def add_samples(self, samples: Sequence[SampleView]) -> None:
        if samples:
            await self._redis.do("RPUSH", f"{self._job}:samples", *(s.model_dump_json() for s in samples))

    async def samples(self, limit: int) -> list[SampleView]:
        """The newest samples first."""
        found = await self._redis.do("LRANGE", f"{self._job}:samples", -limit, -1)
        return [SampleView.model_validate_json(sample) for sample in reversed(found)]

    async def samples_between(self, after: int, last: int) -> list[SampleView]:
        """The samples of the steps after `after` up to `last` that are kept, in the order of their steps. Steps of an
        earlier attempt, before a rewind, are left out."""
        found: list[SampleView] = []
        end = -1
        while page := await self._redis.do("LRANGE", f"{self._job}:samples", end - SAMPLES_PAGE + 1, end):
            for one in reversed(page):
                sample = SampleView.model_validate_json(one)
                if not after < sample.step <= (found[-1].step if found else last):
                    return found[::-1]
                found.append(sample)
            end -= SAMPLES_PAGE
        return found[::-1]

    async def sample_count(self) -> int:
        return int(await self._redis.do("LLEN", f"{self._job}:samples"))

    async def sample_range(self, first: int, end: int) -> list[SampleView]:
        """The samples from the index `first` up to `end`, which is not one of them; the oldest has index 0."""
        found = await self._redis.read("LRANGE", f"{self._job}:samples", first, end - 1) if end > first else []
        return [SampleView.model_validate_json(sample) for sample in found]

    # Tokens of groups that samples show.

    async def add_tokens(self, record: TokenRecord) -> str:
        """Keeps the record in place of the oldest ones; answers its name."""
        size = len(record.group) + len(record.trained)
        kept = max(1, min(TOKEN_RECORDS, TOKEN_BYTES_KEPT // max(1, size)))
        fields = ("group", record.group, *(("trained", record.trained) if record.trained else ()))
        add = ("XADD", f"{self._job}:tokens", "MAXLEN", kept, "*", *fields)
        return text((await self._redis.together(add, ("EXPIRE", f"{self._job}:tokens", TOKENS_KEPT_S)))[0])

    async def tokens(self, name: str) -> TokenRecord | None:
        """The record of this name; None if it is not kept any more."""
        found = await self._redis.read("XRANGE", f"{self._job}:tokens", name, name)
        if not found:
            return None
        ((_, fields),) = found
        return TokenRecord(bytes(fields[b"group"]), bytes(fields.get(b"trained", b"")))

    # The batch of the step in progress.

    async def set_batch(self, batch: StoredBatch) -> None:
        """Keeps the batch until the step is marked as trained: after a crash the same groups are sent again."""
        tree = {**dataclasses.asdict(batch), "groups": [s.to_json() for s in batch.groups]}
        await self._redis.do("SET", f"{self._job}:batch", json.dumps(tree))

    async def batch(self) -> StoredBatch | None:
        """The batch of the step in progress; None if there is none."""
        found = await self._redis.do("GET", f"{self._job}:batch")
        if found is None:
            return None
        tree = json.loads(found)
        groups = [GroupSummary.from_json(s) for s in tree["groups"]]
        sizes = tree.get("sizes", [len(groups)])  # release 0.1 kept whole batches only
        return StoredBatch(int(tree["step"]), groups, float(tree["waited_s"]), sizes, tree.get("complete", True))

    # Notes of the stages, and reports of publications.

    async def set_note(self, name: str, value: Any) -> None:
        await self._redis.do("HSET", f"{self._job}:kept", name, json.dumps(value))

    async def note(self, name: str) -> Any:
        found = await self._redis.do("HGET", f"{self._job}:kept", name)
        return None if found is None else json.loads(found)

    async def add_publication(self, report: Mapping[str, Any]) -> None:
        command = ("RPUSH", f"{self._job}:publications", json.dumps(report))
        await self._redis.together(command, ("LTRIM", f"{self._job}:publications", -1000, -1))

    async def publications(self) -> list[dict[str, Any]]:
        return [json.loads(r) for r in await self._redis.do("LRANGE", f"{self._job}:publications", 0, -1)]

    # Spans, in batches as they came: see services/coordinator/observe/span_store.py.

    async def add_spans(self, step: int, batches: Sequence[bytes], keep_steps: int) -> None:
        """Adds batches that came during `step`, and deletes those of steps before the last `keep_steps`."""
        name = f"{self._job}:spans"
        scored = [part for batch in batches for part in (step, batch)]
        old = ("ZREMRANGEBYSCORE", name, "-inf", f"({step - keep_steps + 1}")
        await self._redis.together(("ZADD", name, *scored), old, ("EXPIRE", name, SPANS_KEPT_S))

    async def spans(self, first: int, last: int) -> list[bytes]:
        """The batches that came during the steps `first` to `last`."""
        found: list[bytes] = await self._redis.read("ZRANGE", f"{self._job}:spans", first, last, "BYSCORE")
        return found

    # Checkpoints.

    async def add_checkpoint(self, step: int, cut: Mapping[str, Any]) -> None:
        """Makes the checkpoint of `step` the job's newest. `cut`: the coordinator's state that belongs to it."""
        await self._redis.together(
            ("HSET", f"{self._job}:checkpoints", step, json.dumps(cut)),
            ("HSET", self._job, "checkpoint", cut["path"], "checkpoint_step", step),
        )

    async def checkpoints(self) -> dict[int, dict[str, Any]]:
        found = await self._redis.do("HGETALL", f"{self._job}:checkpoints")
        return {int(step): json.loads(cut) for step, cut in sorted(found.items(), key=lambda item: int(item[0]))}

    async def remove_checkpoint(self, step: int) -> None:
        await self._redis.do("HDEL", f"{self._job}:checkpoints", step)


def _event(identity: str, fields: Mapping[bytes, bytes]) -> Event:
    values = {text(name): text(value) for name, value in fields.items()}
    return Event.model_validate({"id": identity, **values, "data": json.loads(values["data"])})

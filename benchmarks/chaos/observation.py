"""What Redis holds of one job at one moment, read in one transaction and without the coordinator."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from millrace.events import EventKind
from millrace.ids import JobId, Purpose
from services.coordinator.redis_server import RedisServer
from services.coordinator.state.ledger import Counts
from services.coordinator.store.index import ALL
from services.coordinator.store.jobs import key
from services.coordinator.store.prompts import PARTS

DEADLINE_S = 2.0
MILESTONES = (
    EventKind.TRAINER_LOST,
    EventKind.TRAINER_CONFIGURING,
    EventKind.TRAINER_CONFIGURED,
    EventKind.MEMBER_OUT,
    EventKind.MEMBER_JOINED,
    EventKind.MEMBER_CONFIGURED,
    EventKind.PUBLICATION_DONE,
)
"""Events between a fault and the next step, in the order in which they usually come."""


@dataclass(frozen=True)
class Observation:
    """One job in Redis."""

    jobs: list[str]
    """Ids of all jobs."""
    record: dict[str, str]
    """The job's fields: step, version, cursor, state, failure, checkpoint, ..."""
    counts: Counts
    states: dict[str, str]
    """Prompt → state."""
    settled: dict[str, int]
    """Prompt → the step in which it was trained or dropped."""
    reasons: dict[str, str]
    """Dropped prompt → reason."""
    reason_counts: dict[str, int]
    rewinding: bool
    """A rewind has begun and is not finished: prompts of later steps are still settled."""
    versions: dict[str, tuple[int, ...]]
    """Prompt with a complete group → the oldest and newest versions of its trajectories."""
    rows: dict[int, dict[str, float]]
    """Step → metrics."""
    checkpoints: dict[int, dict[str, Any]]
    """Step → the coordinator's part of the checkpoint."""
    lease_ages_s: list[float]
    """Of each lease that a replica holds, the seconds since it was claimed or extended."""

    @property
    def step(self) -> int:
        return int(self.record["step"])

    @property
    def by_state(self) -> Counter[str]:
        return Counter(self.states.values())

    def trained(self) -> set[str]:
        return {prompt for prompt, state in self.states.items() if state == "trained"}


class Observer:
    """A connection of its own to the stack's Redis."""

    def __init__(self, coordinator_state: Path) -> None:
        self._redis = Redis.from_url(RedisServer(coordinator_state / "redis").url, socket_timeout=DEADLINE_S)

    def step(self, job_id: str) -> int | None:
        """Steps trained; None while Redis does not answer."""
        try:
            return int(self._redis.hget(key(job_id), "step") or 0)
        except (RedisError, OSError):
            return None

    def publishes(self, job_id: JobId) -> bool:
        """Whether the newest step is trained and its publication has not ended. False while Redis does not answer."""
        step = self.step(job_id)
        row = self._row(job_id, step) if step else None
        return row is not None and "timing_s/update_weights" not in row["values"]

    def step_began_s(self, job_id: JobId, step: int) -> float | None:
        """Unix time at which a step that is trained was sent to the trainer; None while Redis does not answer."""
        return float(row["time_s"] - row["values"]["timing_s/train"]) if (row := self._row(job_id, step)) else None

    def _row(self, job_id: JobId, step: int) -> dict[str, Any] | None:
        """The metrics of a step that is trained; None while Redis does not answer."""
        try:
            row = self._redis.hget(f"{key(job_id)}:metrics", str(step))
        except (RedisError, OSError):
            return None
        return dict(json.loads(row)) if row else None

    def observe(self, job_id: JobId) -> Observation | None:
        """None while Redis does not answer."""
        job, base = key(job_id), f"{key(job_id)}:{Purpose.TRAIN}"
        parts = dict(zip(PARTS, (f"{base}:{part}" for part in PARTS), strict=True))
        pipe = self._redis.pipeline(transaction=True)
        pipe.zrange(ALL, 0, -1)
        for name in (job, parts["counts"], parts["state"], parts["reason"], parts["reasons"], parts["notes"]):
            pipe.hgetall(name)
        pipe.zrange(parts["settled"], 0, -1, withscores=True)
        pipe.hgetall(parts["summaries"])
        pipe.hgetall(f"{job}:metrics")
        pipe.hgetall(f"{job}:checkpoints")
        pipe.xpending_range(parts["queue"], "replicas", "-", "+", 1000)
        try:
            answers = pipe.execute(raise_on_error=False)
        except (RedisError, OSError):
            return None
        if any(isinstance(answer, Exception) for answer in answers[:-1]):
            return None
        return _observation(answers)

    def milestones(self, job_id: JobId, since_s: float) -> dict[str, float]:
        """Event kind → seconds from `since_s`, a Unix time, to the first event of this kind after it."""
        found: dict[str, float] = {}
        try:
            events = self._redis.xrange(f"{key(job_id)}:events", f"{int(since_s * 1000)}-0")
        except (RedisError, OSError):
            return found
        for _, fields in events:
            kind, seconds = fields[b"kind"].decode(), float(fields[b"time_s"]) - since_s
            if kind in MILESTONES:
                found.setdefault(kind, seconds)
        return found

    def values(self) -> list[bytes]:
        """Every string that Redis holds, whatever its type."""
        return [value for name in self._redis.scan_iter() for value in self._of(name)]

    def _of(self, name: bytes) -> list[bytes]:
        match self._redis.type(name):
            case b"string":
                return [self._redis.get(name) or b""]
            case b"hash":
                return list(self._redis.hgetall(name).values())
            case b"list":
                return list(self._redis.lrange(name, 0, -1))
            case b"stream":
                return [v for _, fields in self._redis.xrange(name) for v in fields.values()]
            case b"set":
                return list(self._redis.smembers(name))
            case b"zset":
                return list(self._redis.zrange(name, 0, -1))
            case _:
                return []  # it has expired meanwhile

    def close(self) -> None:
        self._redis.close()


def _observation(answers: Sequence[Any]) -> Observation:
    """From the answers of Redis, in the order of the questions of `Observer.observe`."""
    jobs, record, counts, state, reason, reasons, notes, settled, summaries, metrics, saved, pending = answers
    held = [] if isinstance(pending, ResponseError) else pending
    return Observation(
        jobs=[name.decode() for name in jobs],
        record=_text(record),
        counts=Counts(**{name: int(value) for name, value in _text(counts).items()}),
        states=_text(state),
        settled={prompt.decode(): int(step) for prompt, step in settled},
        reasons=_text(reason),
        reason_counts={name: int(count) for name, count in _text(reasons).items() if int(count)},
        rewinding="undoing_after" in _text(notes),
        versions={prompt: _versions(json.loads(text)) for prompt, text in _text(summaries).items()},
        rows={int(step): _numbers(json.loads(row)["values"]) for step, row in metrics.items()},
        checkpoints={int(step): json.loads(cut) for step, cut in saved.items()},
        lease_ages_s=[lease["time_since_delivered"] / 1000 for lease in held if lease["consumer"] != b"nobody"],
    )


def _text(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in fields.items()}


def _versions(summary: Mapping[str, Any]) -> tuple[int, ...]:
    """Versions of a complete group's oldest and newest tokens."""
    return *summary["oldest"], *(summary["newest"] or ())


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}

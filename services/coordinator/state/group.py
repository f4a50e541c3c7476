"""What the coordinator reads of a group: lengths, rewards, versions. The tokens stay packed."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from millrace.drops import Drop, DropReason
from millrace.ids import PromptId, Version
from millrace.rewards.outcome import NOT_FINITE, fits
from millrace.wire.v1 import common_pb2

Details = Mapping[str, Any]
Value = TypeVar("Value")
VOTE_DIGITS = 16


@dataclass(frozen=True)
class GroupSummary:
    """A complete, scored group. Lists run over its trajectories."""

    prompt_id: PromptId
    data_source: str
    prompt_tokens: int
    response_tokens: list[int]
    rewards: list[float]
    oldest: list[int]
    """The oldest version among a trajectory's tokens."""
    truncated: int
    """Trajectories that ended at max_response_tokens."""
    generate_s: float
    score_s: float
    member_id: str
    accuracies: list[float] | None = None
    """`acc` of each answer to a held-out prompt; None where the reward function did not give every answer one."""
    votes: list[str] | None = None
    """A digest of `pred` of each answer to a held-out prompt; None where not every answer has one."""

    @classmethod
    def of(cls, group: common_pb2.Group) -> Self:
        """The summary of a group in which `fault` finds nothing."""
        stop = common_pb2.STOP_REASON_LENGTH
        held_out = group.purpose == common_pb2.PURPOSE_EVALUATION
        details = [_details(t.reward_details) for t in group.trajectories] if held_out else []
        return cls(
            prompt_id=PromptId(group.prompt_id),
            data_source=group.data_source,
            prompt_tokens=len(group.prompt_tokens) // 4,
            response_tokens=[len(t.tokens) // 4 for t in group.trajectories],
            rewards=[t.reward for t in group.trajectories],
            oldest=[min(span.version for span in t.versions) for t in group.trajectories],
            truncated=sum(t.stop_reason == stop for t in group.trajectories),
            generate_s=group.generate_s,
            score_s=group.score_s,
            member_id=group.member_id,
            accuracies=_of_every(_accuracy, details),
            votes=_of_every(_vote, details),
        )

    def staleness(self, version: Version) -> int:
        """Staleness of the group's stalest trajectory, at the trainer's `version`."""
        return version - min(self.oldest)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        return cls(**json.loads(data))


def _details(text: str) -> Details:
    """What the reward function returned besides the score; empty where that is no JSON object."""
    try:
        details = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return details if isinstance(details, dict) else {}


def _of_every(read: Callable[[Details], Value | None], details: Sequence[Details]) -> list[Value] | None:
    """What `read` finds in the details of each answer; None where one lacks it, or there are no answers."""
    found = [value for each in details if (value := read(each)) is not None]
    return found if found and len(found) == len(details) else None


def _accuracy(details: Details) -> float | None:
    value = details.get("acc")
    return float(value) if isinstance(value, bool | int | float) and fits(value) else None


def _vote(details: Details) -> str | None:
    """A digest, as a prediction may be a whole answer."""
    if "pred" not in details:
        return None
    try:
        return hashlib.sha256(json.dumps(details["pred"], sort_keys=True).encode()).hexdigest()[:VOTE_DIGITS]
    except RecursionError:
        return None


def fault(group: common_pb2.Group, samples: int, *, greedy_baseline: bool = False) -> Drop | None:
    """Why a group that should have `samples` trajectories cannot be trained; None where it can."""
    if len(group.trajectories) != samples:
        return _incomplete(f"{len(group.trajectories)} trajectories instead of {samples}")
    if greedy_baseline and not (group.HasField("greedy_reward") and fits(group.greedy_reward)):
        return _incomplete("there is no reward of a greedy answer")
    if not group.prompt_tokens or len(group.prompt_tokens) % 4:
        return _malformed(f"{len(group.prompt_tokens)} bytes of prompt tokens, which have 4 each")
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in (group.generate_s, group.score_s)):
        return _malformed(f"seconds of {group.generate_s} and {group.score_s}")
    return next((drop for trajectory in group.trajectories if (drop := _trajectory_fault(trajectory))), None)


def _trajectory_fault(trajectory: common_pb2.Trajectory) -> Drop | None:
    if not trajectory.HasField("reward"):
        return Drop(DropReason.REWARD_FAILED, trajectory.reward_failure or "there is no reward")
    if not fits(trajectory.reward):
        return Drop(DropReason.REWARD_FAILED, f"the reward is {trajectory.reward}, {NOT_FINITE}")
    tokens = len(trajectory.tokens) // 4
    if len(trajectory.tokens) % 4:
        return _malformed(f"{len(trajectory.tokens)} bytes of tokens, which have 4 each")
    if tokens == 0 or len(trajectory.logprobs) != len(trajectory.tokens):
        return _malformed(f"{tokens} tokens with {len(trajectory.logprobs) // 4} log-probabilities")
    spans = trajectory.versions
    joined = all(a.end == b.start for a, b in zip(spans, list(spans)[1:], strict=False))
    if (
        not spans
        or spans[0].start != 0
        or spans[-1].end != tokens
        or not joined
        or any(s.start >= s.end for s in spans)
    ):
        return _malformed(f"the version spans do not cover the {tokens} response tokens")
    return None


def _incomplete(detail: str) -> Drop:
    return Drop(DropReason.INCOMPLETE_GROUP, detail)


def _malformed(detail: str) -> Drop:
    return Drop(DropReason.MALFORMED_GROUP, detail)

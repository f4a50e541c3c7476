"""What the coordinator reads of a group: lengths, rewards, versions. Its tokens stay packed."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Self

from millrace.errors import BadRow
from millrace.ids import PromptId, Version
from millrace.rewards.outcome import NOT_FINITE, fits
from millrace.wire.v1 import common_pb2


@dataclass(frozen=True)
class Summary:
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

    @classmethod
    def of(cls, group: common_pb2.Group, samples: int, *, greedy_baseline: bool = False) -> Self:
        """Raises BadRow, its first word a reason for the ledger, where the group cannot be trained."""
        if len(group.trajectories) != samples:
            raise BadRow(f"incomplete_group: {len(group.trajectories)} trajectories instead of {samples}")
        if greedy_baseline and not (group.HasField("greedy_reward") and fits(group.greedy_reward)):
            raise BadRow("incomplete_group: there is no reward of a greedy answer")
        for trajectory in group.trajectories:
            _check(trajectory)
        stop = common_pb2.STOP_REASON_LENGTH
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
        )

    def staleness(self, version: Version) -> int:
        """Of the group's stalest trajectory, at the trainer's `version`."""
        return version - min(self.oldest)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        return cls(**json.loads(data))


def _check(trajectory: common_pb2.Trajectory) -> None:
    if not trajectory.HasField("reward"):
        raise BadRow(f"reward: {trajectory.reward_failure or 'none was given'}")
    if not fits(trajectory.reward):
        raise BadRow(f"reward: it is {trajectory.reward}, {NOT_FINITE}")
    tokens = len(trajectory.tokens) // 4
    if tokens == 0 or len(trajectory.logprobs) != len(trajectory.tokens):
        raise BadRow(f"malformed_group: {tokens} tokens with {len(trajectory.logprobs) // 4} log-probabilities")
    spans = trajectory.versions
    joined = all(a.end == b.start for a, b in zip(spans, list(spans)[1:], strict=False))
    if not spans or spans[0].start != 0 or spans[-1].end != tokens or not joined:
        raise BadRow(f"malformed_group: its version spans do not cover the {tokens} response tokens")

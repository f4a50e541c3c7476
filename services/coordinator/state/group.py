"""What the coordinator reads of a group: lengths, rewards, versions. The tokens stay packed."""

import dataclasses
import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from millrace.contracts.trajectories import (
    TOKEN_BYTES,
    Span,
    episode_reward,
    episode_sizes,
    episodes,
    response_tokens,
    sampled_spans,
)
from millrace.contracts.v1 import common_pb2
from millrace.drops import Drop, DropReason
from millrace.ids import PromptId, Version
from millrace.rewards.outcome import NOT_FINITE, fits
from millrace.spec.schedule import StalenessOf
from millrace.wire.enums import fields_of

Details = Mapping[str, Any]
Value = TypeVar("Value")
VOTE_DIGITS = 16
SHOWN = 8
"""Most turns or episodes that a message lists."""


@dataclass(frozen=True)
class TrajectoryShape:
    """Which part of a trajectory the policy sampled, and the episode that it belongs to."""

    episode: int
    """Counted from 0 within the group."""
    prompt_tokens: int
    sampled_tokens: int
    turns: int


@dataclass(frozen=True)
class Account:
    """What happened in an episode with an environment."""

    ended: bool
    """Whether the environment ended it, not a limit of turns or tokens."""
    tool_calls: int
    tool_failures: int
    tool_s: float
    reruns: int
    prefix_tokens: int = 0
    """Tokens of the turn before with which later turns began; and those of them that the engine's cache had."""
    cached_prefix_tokens: int = 0
    held_back_s: float = 0.0
    open_episodes: int = 0
    """Episodes that went on on its replica when it ended; and the most that were allowed to, 0 without a limit."""
    episode_limit: int = 0

    @classmethod
    def of(cls, account: common_pb2.EpisodeAccount) -> Self:
        """The account that a replica reported."""
        found = fields_of(account)
        return cls(ended=found.pop("end") == common_pb2.EPISODE_END_DONE, **found)


@dataclass(frozen=True)
class GroupSummary:
    """A complete, scored group. Lists run over its trajectories, those of rewards and what belongs to them over its
    episodes."""

    prompt_id: PromptId
    data_source: str
    prompt_tokens: int
    response_tokens: list[int]
    """Tokens after the prompt, sampled and given."""
    rewards: list[float]
    oldest: list[int]
    """The oldest version among a trajectory's tokens."""
    truncated: int
    """Trajectories that ended at max_response_tokens."""
    generate_s: float
    score_s: float
    member_id: str
    accuracies: list[float] | None = None
    """`acc` of each answer to a held-out prompt; None if the reward function did not give every answer one."""
    votes: list[str] | None = None
    """A digest of `pred` of each answer to a held-out prompt; None if not every answer has one."""
    parts: dict[str, list[float]] | None = None
    """The separate rewards of each episode, by name; None if the job names none. A name that some episode lacks is
    left out."""
    shapes: list[TrajectoryShape] | None = None
    """None if each trajectory is an episode of one turn, all of its response was sampled, and its prompt is the
    group's."""
    accounts: list[Account] | None = None
    """The account of each episode; None if they had no environment."""
    traceparent: str = ""
    """The root span of the group's trace; empty if it has none."""
    issued_s: float = 0.0
    """Unix time at which the prompt was issued; 0: not known."""
    completed_s: float = 0.0
    """Unix time at which the group came; 0: not known."""
    cancelled: int = 0
    """Episodes that were cancelled when the group had enough others."""
    failed: int = 0
    """Episodes that failed and were left out."""
    means: list[float] | None = None
    """The mean version of a trajectory's tokens. None if all tokens of each are of its oldest version."""
    versions: list[int] | None = None
    """Number of versions that sampled a trajectory's tokens. None: one each."""
    newest: list[int] | None = None
    """The newest version among a trajectory's tokens. None: the oldest."""
    entry: str = ""
    """Id of the lease that it answers: ids grow in the order of issue."""

    @classmethod
    def of(cls, group: common_pb2.Group, parts: Sequence[str] = ()) -> Self:
        """The summary of a group in which `fault` finds nothing. `parts`: names of its separate rewards."""
        stop = common_pb2.STOP_REASON_LENGTH
        held_out = group.purpose == common_pb2.PURPOSE_EVALUATION
        shapes, prompt_tokens = _shapes(group), len(group.prompt_tokens) // TOKEN_BYTES
        by_episode = [[one] for one in group.trajectories] if shapes is None else episodes(group)
        known = [_details(each[-1].reward_details) for each in by_episode] if held_out or parts else []
        details = known if held_out else []
        partial = any(len({span.version for span in t.versions}) > 1 for t in group.trajectories)
        return cls(
            prompt_id=PromptId(group.prompt_id),
            data_source=group.data_source,
            prompt_tokens=prompt_tokens,
            response_tokens=[len(t.tokens) // TOKEN_BYTES for t in group.trajectories],
            rewards=[t.reward for t in group.trajectories] if shapes is None else list(map(episode_reward, by_episode)),
            oldest=[min(span.version for span in t.versions) for t in group.trajectories],
            truncated=sum(t.stop_reason == stop for t in group.trajectories),
            generate_s=group.generate_s,
            score_s=group.score_s,
            member_id=group.member_id,
            accuracies=_of_every(_accuracy, details),
            votes=_of_every(_vote, details),
            parts=_parts(parts, known) if parts else None,
            shapes=shapes,
            accounts=[Account.of(t.account) for t in group.trajectories if t.HasField("account")] or None,
            traceparent=group.traceparent,
            issued_s=group.issued_s,
            cancelled=group.cancelled_episodes,
            failed=group.failed_episodes,
            means=[_mean_version(t.versions) for t in group.trajectories] if partial else None,
            versions=[len({span.version for span in t.versions}) for t in group.trajectories] if partial else None,
            newest=[max(span.version for span in t.versions) for t in group.trajectories] if partial else None,
        )

    def compared(self, names: Sequence[str]) -> list[list[float]]:
        """The rewards of the episodes that advantages compare: those with these names, of which `score` is the reward;
        without names the reward alone."""
        parts = {**(self.parts or {}), "score": self.rewards}
        return [parts.get(name, self.rewards) for name in names or ("score",)]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each trajectory, prompt and response."""
        prompts = [self.prompt_tokens] * len(self.response_tokens)
        if self.shapes is not None:
            prompts = [shape.prompt_tokens for shape in self.shapes]
        return [prompt + response for prompt, response in zip(prompts, self.response_tokens, strict=True)]

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled, of all trajectories."""
        return sum(self.response_tokens if self.shapes is None else (shape.sampled_tokens for shape in self.shapes))

    @property
    def trajectories_of_episodes(self) -> list[int]:
        """Number of trajectories of each episode."""
        if self.shapes is None:
            return [1] * len(self.response_tokens)
        return list(Counter(shape.episode for shape in self.shapes).values())

    @property
    def turns(self) -> list[int]:
        """Number of turns of each episode."""
        turns: Counter[int] = Counter()
        for number, shape in enumerate(self.shapes or [None] * len(self.response_tokens)):
            turns[number if shape is None else shape.episode] += 1 if shape is None else shape.turns
        return list(turns.values())

    def staleness(self, version: Version, of: StalenessOf = "oldest") -> float:
        """Staleness of the group's stalest trajectory, at the trainer's `version`, as `of` counts. Negative for tokens
        of a version that the trainer does not hold."""
        if (oldest := version - min(self.oldest)) < 0 or of == "oldest":
            return oldest
        if of == "mean":
            return version - min(self.means or self.oldest)
        return max(self.versions or [1]) - 1

    @property
    def newest_version(self) -> Version:
        """The newest version among all tokens."""
        return Version(max(self.newest or self.oldest))

    @property
    def spans(self) -> list[int]:
        """Newest version of each trajectory's tokens less its oldest one."""
        return [new - old for new, old in zip(self.newest or self.oldest, self.oldest, strict=True)]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        tree = json.loads(data)
        if tree.get("shapes") is not None:
            tree["shapes"] = [TrajectoryShape(**shape) for shape in tree["shapes"]]
        if tree.get("accounts") is not None:
            tree["accounts"] = [Account(**account) for account in tree["accounts"]]
        return cls(**tree)


def _mean_version(spans: Iterable[common_pb2.VersionSpan]) -> float:
    tokens = [(span.version, span.end - span.start) for span in spans]
    return sum(version * count for version, count in tokens) / sum(count for _, count in tokens)


def _shapes(group: common_pb2.Group) -> list[TrajectoryShape] | None:
    """The shapes of the group's trajectories; None if each is a plain answer to the group's prompt."""
    if not group.episode_trajectories and not any(t.turns or t.prompt_tokens for t in group.trajectories):
        return None
    return [
        TrajectoryShape(
            episode=number,
            prompt_tokens=len(trajectory.prompt_tokens or group.prompt_tokens) // TOKEN_BYTES,
            sampled_tokens=sum(end - start for start, end in sampled_spans(trajectory)),
            turns=max(1, len(trajectory.turns)),
        )
        for number, trajectories in enumerate(episodes(group))
        for trajectory in trajectories
    ]


def _details(text: str) -> Details:
    """What the reward function returned besides the score; empty if that is no JSON object."""
    try:
        details = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return details if isinstance(details, dict) else {}


def _of_every(read: Callable[[Details], Value | None], details: Sequence[Details]) -> list[Value] | None:
    """What `read` finds in the details of each answer; None if one lacks it, or there are no answers."""
    found = [value for each in details if (value := read(each)) is not None]
    return found if found and len(found) == len(details) else None


def _parts(names: Sequence[str], details: Sequence[Details]) -> dict[str, list[float]]:
    read = {name: [_number(each.get(name)) for each in details] for name in names}
    return {name: [v for v in values if v is not None] for name, values in read.items() if None not in values}


def _number(value: Any) -> float | None:
    """A reward that the trainer can compute with; None for anything else."""
    return float(value) if isinstance(value, int | float) and fits(value) else None


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


@dataclass(frozen=True)
class Wanted:
    """What a group has to be, so that it can be trained."""

    episodes: int
    least: int | None = None
    """Episodes that are enough; None: all of them."""
    greedy_baseline: bool = False
    temperature: float | None = None
    """The only temperature of its turns; None if they are not trained."""
    most_tokens: int | None = None
    """Tokens that a trajectory of several turns may have, prompt and response; None: no limit."""
    teacher_top: int | None = None
    """Number of tokens that the teacher reports in each place; None if there is no teacher."""


def fault(group: common_pb2.Group, wanted: Wanted) -> Drop | None:
    """Why a group cannot be trained; None if it can."""
    sizes, count = episode_sizes(group), len(group.trajectories)
    if sum(sizes) != count or 0 in sizes:
        return _malformed(f"{count} trajectories in episodes of {list(sizes)[:SHOWN]}")
    least = wanted.episodes if wanted.least is None else wanted.least
    if not least <= len(sizes) <= wanted.episodes:
        asked = f"{wanted.episodes}" if least == wanted.episodes else f"{least} to {wanted.episodes}"
        return _incomplete(f"{len(sizes)} episodes instead of {asked}")
    if wanted.greedy_baseline and not (group.HasField("greedy_reward") and fits(group.greedy_reward)):
        return _incomplete("there is no reward of a greedy answer")
    if not group.prompt_tokens or len(group.prompt_tokens) % TOKEN_BYTES:
        return _malformed(f"{len(group.prompt_tokens)} bytes of prompt tokens, which have 4 each")
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in (group.generate_s, group.score_s)):
        return _malformed(f"seconds of {group.generate_s} and {group.score_s}")
    last = {end - 1 for end in itertools.accumulate(sizes)}
    for number, trajectory in enumerate(group.trajectories):
        drop = _reward_fault(trajectory, ends_episode=number in last) or _trajectory_fault(trajectory)
        if drop is None and (trajectory.turns or trajectory.prompt_tokens):
            drop = _turns_fault(trajectory, len(group.prompt_tokens), wanted)
        if drop is None and wanted.teacher_top is not None:
            drop = _teacher_fault(trajectory, wanted.teacher_top)
        if drop is not None:
            return drop
    return None


def _reward_fault(trajectory: common_pb2.Trajectory, *, ends_episode: bool) -> Drop | None:
    if not trajectory.HasField("reward") and (ends_episode or trajectory.reward_failure):
        return Drop(DropReason.REWARD_FAILED, trajectory.reward_failure or "there is no reward")
    rewards = [trajectory.reward, *(turn.reward for turn in trajectory.turns)]
    if (bad := next((reward for reward in [*rewards, sum(rewards)] if not fits(reward)), None)) is not None:
        return Drop(DropReason.REWARD_FAILED, f"the reward is {bad}, {NOT_FINITE}")
    return None


def _trajectory_fault(trajectory: common_pb2.Trajectory) -> Drop | None:
    if len(trajectory.tokens) % TOKEN_BYTES:
        return _malformed(f"{len(trajectory.tokens)} bytes of tokens, which have 4 each")
    tokens, spans = response_tokens(trajectory), sampled_spans(trajectory)
    turns = _joined(spans)
    if trajectory.turns and (turns is None or turns[-1][1] > tokens):
        return _malformed(f"the turns {spans[:SHOWN]} do not follow each other in the {tokens} response tokens")
    sampled = sum(end - start for start, end in spans)
    if sampled == 0 or len(trajectory.logprobs) != TOKEN_BYTES * sampled:
        return _malformed(f"{sampled} sampled tokens with {len(trajectory.logprobs) // 4} log-probabilities")
    if _joined((span.start, span.end) for span in trajectory.versions) != turns:
        return _malformed(f"the version spans do not cover the {sampled} sampled tokens, or cover others")
    return None


def _turns_fault(trajectory: common_pb2.Trajectory, group_prompt_bytes: int, wanted: Wanted) -> Drop | None:
    """What is wrong with a trajectory that is no plain answer to the group's prompt."""
    if len(trajectory.prompt_tokens) % TOKEN_BYTES:
        return _malformed(f"{len(trajectory.prompt_tokens)} bytes of prompt tokens, which have 4 each")
    tokens = (len(trajectory.prompt_tokens) or group_prompt_bytes) // TOKEN_BYTES + response_tokens(trajectory)
    if wanted.most_tokens is not None and tokens > wanted.most_tokens:
        limit = "data.max_prompt_tokens and rollout.max_response_tokens together"
        return _malformed(f"a trajectory has {tokens} tokens, more than {wanted.most_tokens}, which are {limit}")
    for turn in trajectory.turns:
        if wanted.temperature is not None and turn.temperature not in (0.0, wanted.temperature):
            what = f"a turn was sampled at temperature {turn.temperature:g}, the job trains at {wanted.temperature:g}"
            return _malformed(what)
    return None


def _teacher_fault(trajectory: common_pb2.Trajectory, top: int) -> Drop | None:
    """What is wrong with the sizes of the teacher's scores."""
    scores, sampled = trajectory.teacher, len(trajectory.logprobs)
    found = (len(scores.logprobs), len(scores.top_tokens), len(scores.top_logprobs))
    if found == (sampled, top * sampled, top * sampled):
        return None
    tokens = sampled // TOKEN_BYTES
    return _malformed(f"the teacher's scores of {tokens} sampled tokens, with {top} others each, have {found} bytes")


def _joined(spans: Iterable[Span]) -> list[Span] | None:
    """The spans, with those that touch made one; None if one is empty or begins before the end of another."""
    joined: list[Span] = []
    for start, end in spans:
        before = joined[-1][1] if joined else 0
        if start >= end or start < before:
            return None
        joined[-1:] = [(joined[-1][0], end)] if joined and start == before else [*joined[-1:], (start, end)]
    return joined


def _incomplete(detail: str) -> Drop:
    return Drop(DropReason.INCOMPLETE_GROUP, detail)


def _malformed(detail: str) -> Drop:
    return Drop(DropReason.MALFORMED_GROUP, detail)

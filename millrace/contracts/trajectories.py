"""Tokens on the wire: those of a trajectory that the policy sampled, the trajectories of an episode, and the parts of
the responses of a lease."""

from collections.abc import Iterable, Sequence

from millrace.contracts.v1 import common_pb2, work_pb2

TOKEN_BYTES = 4
Span = tuple[int, int]
"""Response tokens from the first number up to the second, which is not one of them."""


def response_tokens(trajectory: common_pb2.Trajectory) -> int:
    """Number of response tokens, sampled and given."""
    return len(trajectory.tokens) // TOKEN_BYTES


def sampled_spans(trajectory: common_pb2.Trajectory) -> list[Span]:
    """The sampled tokens of each turn."""
    if not trajectory.turns:
        return [(0, response_tokens(trajectory))]
    return [(turn.start, turn.end) for turn in trajectory.turns]


def episode_sizes(group: common_pb2.Group) -> Sequence[int]:
    """Number of trajectories of each episode of the group."""
    return group.episode_trajectories or [1] * len(group.trajectories)


def episodes(group: common_pb2.Group) -> list[list[common_pb2.Trajectory]]:
    """The trajectories of each episode."""
    rest = iter(group.trajectories)
    return [[next(rest) for _ in range(size)] for size in episode_sizes(group)]


def episode_reward(trajectories: Sequence[common_pb2.Trajectory]) -> float:
    """The reward of an episode: the sum over its trajectories and their turns."""
    return sum(one.reward + sum(turn.reward for turn in one.turns) for one in trajectories)


def assembled(parts: Iterable[work_pb2.Part]) -> list[work_pb2.Part]:
    """One part for each request, from its first token on, in the order of the requests.

    A part that contradicts itself, or begins behind the end of what is known, is left out: its tokens are generated
    again."""
    known: dict[int, work_pb2.Part] = {}
    for part in parts:
        before = known.get(part.request, work_pb2.Part(request=part.request))
        if part.start <= tokens_of(before) and _is_sound(part):
            known[part.request] = _appended(before, part)
    return [known[request] for request in sorted(known) if tokens_of(known[request])]


def tokens_of(part: work_pb2.Part) -> int:
    """Number of tokens of a part."""
    return len(part.tokens) // TOKEN_BYTES


def _appended(before: work_pb2.Part, part: work_pb2.Part) -> work_pb2.Part:
    kept = part.start
    spans = [(v.version, v.start, min(v.end, kept)) for v in before.versions if v.start < kept]
    for new in part.versions:
        start, end = kept + new.start, kept + new.end
        if spans and spans[-1][0] == new.version:
            spans[-1] = (new.version, spans[-1][1], end)
        else:
            spans.append((new.version, start, end))
    return work_pb2.Part(
        request=part.request,
        tokens=before.tokens[: TOKEN_BYTES * kept] + part.tokens,
        logprobs=before.logprobs[: TOKEN_BYTES * kept] + part.logprobs,
        versions=[common_pb2.VersionSpan(version=v, start=s, end=e) for v, s, e in spans],
        experts=part.experts if part.HasField("experts") else None,
    )


def _is_sound(part: work_pb2.Part) -> bool:
    tokens, end = tokens_of(part), 0
    for span in part.versions:
        if span.start != end or span.end <= end:
            return False
        end = span.end
    experts = part.experts
    of_token = experts.layers * experts.per_token * (1 + experts.wide)
    if part.HasField("experts") and (of_token == 0 or len(experts.chosen) % of_token):
        return False
    return end == tokens and len(part.tokens) == len(part.logprobs) == TOKEN_BYTES * tokens


def within(parts: Sequence[work_pb2.Part], oldest: int, newest: int) -> list[work_pb2.Part]:
    """The parts all of whose tokens are of versions from `oldest` to `newest`."""
    return [part for part in parts if all(oldest <= span.version <= newest for span in part.versions)]

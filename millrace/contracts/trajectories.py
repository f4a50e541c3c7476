"""Which tokens of a trajectory the policy sampled, and how a group's trajectories belong to episodes."""

from collections.abc import Sequence

from millrace.contracts.v1 import common_pb2

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

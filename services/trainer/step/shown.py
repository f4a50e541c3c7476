"""What a step tells of the groups that people look at: the log-probabilities and advantages that its losses read."""

from collections.abc import Sequence

from torch import Tensor

from millrace.contracts.v1.trainer_pb2 import GroupRef, TrainedGroup, TrainedTrajectory
from millrace.wire.arrays import pack_floats

MOST_TOKENS = 1 << 18
"""Most sampled tokens that a step tells of: 2 MiB of log-probabilities and advantages."""


def shown_groups(
    groups: Sequence[GroupRef],
    sampled_lengths: Sequence[int],
    logprobs_bt: Tensor,
    known_bt: Tensor,
    advantages_bt: Tensor,
) -> list[TrainedGroup]:
    """The groups that are `shown`, in order, without those that do not fit into `MOST_TOKENS` beside earlier ones.

    The tensors are those of the whole batch, [trajectories, most sampled tokens], and `sampled_lengths` has the sampled
    tokens of each trajectory. A row of `known_bt` is true for all sampled tokens of a trajectory whose
    log-probabilities were computed, and for no token of any other.
    """
    found, room, end = [], MOST_TOKENS, 0
    for group in groups:
        first, end = end, end + (len(group.response_tokens) or len(group.trajectories))
        lengths = sampled_lengths[first:end]
        if not group.shown or sum(lengths) > room:
            continue
        room -= sum(lengths)
        rows = (values_bt[first:end].float().cpu().numpy() for values_bt in (logprobs_bt, known_bt, advantages_bt))
        trajectories = [
            TrainedTrajectory(
                logprobs=pack_floats(logprobs_t[:length]) if known_t[:length].all() else b"",
                advantages=pack_floats(advantages_t[:length]),
            )
            for length, logprobs_t, known_t, advantages_t in zip(lengths, *rows, strict=True)
        ]
        found.append(TrainedGroup(prompt_id=group.prompt_id, trajectories=trajectories))
    return found

"""Rewards per token from the reward of each trajectory."""

import itertools

import torch
from torch import Tensor

from millrace.rl.formulas.divergence import kl, penalised
from millrace.spec import JobSpec
from services.trainer.step.batch import RankBatch


def token_rewards(spec: JobSpec, batch: RankBatch, old_bt: Tensor | None, ref_bt: Tensor | None) -> Tensor:
    """Rewards per token, float64 [rows, longest], so that equal sums of them are found equal.

    The reward and the overlong penalty are on the last sampled token of a trajectory, the reward of a turn is on the
    last token of that turn. The KL to the reference is subtracted on every token where the job has it in the reward.
    """
    algorithm = spec.algorithm
    rewards_bt = torch.zeros(batch.mask_bt.shape, dtype=torch.float64, device=batch.device)
    for row, (sample, length) in enumerate(zip(batch.samples, batch.lengths, strict=True)):
        if length:
            rewards_bt[row, length - 1] = sample.reward + _overlong(spec, len(sample.response))
        ends = itertools.accumulate(turn.end - turn.start for turn in sample.turns)
        for end, turn in zip(ends, sample.turns, strict=True):
            rewards_bt[row, end - 1] += turn.reward
    if algorithm.kl is None or algorithm.kl_in != "reward":
        return rewards_bt
    assert old_bt is not None and ref_bt is not None
    return penalised(rewards_bt, kl(algorithm.kl.name, old_bt, ref_bt), batch.mask_bt, algorithm.kl_coefficient)


def _overlong(spec: JobSpec, length: int) -> float:
    algorithm, limit = spec.algorithm, spec.rollout.max_response_tokens
    if not algorithm.overlong_buffer_tokens:
        return 0.0
    return overlong_penalty(
        length, limit=limit, buffer=algorithm.overlong_buffer_tokens, penalty=algorithm.overlong_penalty
    )


def overlong_penalty(length: int, *, limit: int, buffer: int, penalty: float = 1.0) -> float:
    """The summand to the reward of an answer of `length` tokens: 0 up to limit − buffer, then falling linearly.

    It is ((limit − buffer) − length) / buffer · penalty (equation 13 of DAPO, arXiv 2503.14476), but at least −penalty.
    With `buffer` 0 there is no penalty up to `limit`. Raises ValueError for a buffer outside 0 to `limit`.
    """
    if buffer < 0 or buffer > limit:
        raise ValueError(f"buffer = {buffer}: it has to be from 0 to the limit, {limit} tokens.")
    beyond = length - (limit - buffer)
    if beyond <= 0:
        return 0.0
    return -penalty * min(beyond / buffer, 1.0) if buffer else -penalty

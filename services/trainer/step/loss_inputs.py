"""What the losses of a step read: rewards, correction weights and advantages, computed over all groups of a batch.

That is the batch of a step, or of a part of it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import nan
from typing import Any

import torch
from torch import Tensor

from millrace.rl.formulas.divergence import kl, penalised
from millrace.rl.registry.catalogue import AlgorithmKind, find
from millrace.spec import JobSpec
from services.trainer.algorithms.corrections import Corrected, correct
from services.trainer.algorithms.functions import advantage
from services.trainer.algorithms.losses import selected_tokens
from services.trainer.algorithms.tokens import check_finite, high_entropy
from services.trainer.protocol.microbatch import MicroBatch
from services.trainer.step.batch import RankBatch
from services.trainer.step.forward_passes import ForwardResults


@dataclass(frozen=True)
class LossInputs:
    """What the losses read of each of this rank's rows, [rows, longest]."""

    mask_bt: Tensor
    """The tokens that count: generated, and kept by the correction."""
    advantages_bt: Tensor
    rollout_bt: Tensor
    """Log-probabilities that the engine reported."""
    old_bt: Tensor | None
    """Log-probabilities of the proximal policy. None if that is the policy before its only update: then the update's
    own log-probabilities are used."""
    ref_bt: Tensor | None
    """Log-probabilities under the reference."""
    weights_bt: Tensor | None
    """Importance weights of the correction, of the losses that sampled tokens estimate."""
    high_entropy_bt: Tensor | None
    """The tokens whose policy loss counts (`algorithm.top_entropy_fraction`), bool; None if that of all does. No
    other loss reads it."""
    selected_bt: Tensor | None
    """The tokens that the policy loss treats differently."""
    values_bt: Tensor | None = None
    """Values of the critic before the step."""
    returns_bt: Tensor | None = None
    """What the critic learns to predict."""
    teacher_bt: Tensor | None = None
    """Log-probabilities under the teacher."""
    teacher_top_btk: Tensor | None = None
    """Log-probabilities of the teacher's most likely tokens under the teacher, [rows, longest, K]."""

    def rows_of(self, batch: MicroBatch) -> "LossInputs":
        """The rows of a micro-batch, [sequences, most sampled tokens of the micro-batch]."""
        rows, longest = list(batch.rows), max(batch.sampled_lengths)
        columns = {column.name: getattr(self, column.name) for column in fields(self)}
        cut: dict[str, Any] = {name: None if of is None else of[rows, :longest] for name, of in columns.items()}
        return LossInputs(**cut)


@dataclass(frozen=True)
class Assessment:
    """What the losses of a batch were made from, of the trajectories of all ranks and on every rank the same: for
    metrics. Tensors [B, T] have a row for each trajectory."""

    mask_bt: Tensor
    rewards_e: Tensor
    """Rewards of each episode, as the advantages read them."""
    advantages_bt: Tensor
    returns_bt: Tensor
    values_bt: Tensor | None
    """Values of the critic."""
    corrected: Corrected | None
    entropy_threshold: float | None
    """Smallest entropy of a token whose policy loss counts, nats; None if that of all tokens does."""


def make_loss_inputs(spec: JobSpec, batch: RankBatch, passes: ForwardResults) -> tuple[LossInputs, Assessment]:
    """The inputs of the losses for this rank's rows, and what they were made from.

    Every rank computes them for the whole batch, so they do not depend on which ranks have a group's samples. Raises
    NonFinite, on every rank the same.
    """
    algorithm, whole_mask_bt = spec.algorithm, batch.whole_mask_bt
    old_bt = batch.rollout_bt if algorithm.old_logprobs == "rollout" else passes.train_bt
    whole_rollout_bt = batch.gather(batch.rollout_bt)
    check_finite("log-probabilities of the engine", whole_rollout_bt, whole_mask_bt, batch.whole_labels)
    rewards_bt = batch.gather(token_rewards(spec, batch, old_bt, passes.ref_bt))
    check_finite("rewards", rewards_bt, whole_mask_bt, batch.whole_labels)
    rewards_et = batch.by_episode(rewards_bt)
    known = _advantage_inputs(spec, batch, passes, old_bt)
    keep_bt, corrected = whole_mask_bt, None
    if algorithm.corrections:
        assert passes.train_bt is not None
        corrected = correct(
            [(correction.name, correction.options) for correction in algorithm.corrections],
            train_logprobs_bt=batch.gather(passes.train_bt),
            rollout_logprobs_bt=whole_rollout_bt,
            mask_bt=whole_mask_bt,
            normalize=algorithm.normalize_correction_weights,
        )
        known["weights_bt"], keep_bt = corrected.weights_bt, corrected.keep_bt
    advantages_et, returns_et = advantage(
        algorithm.advantage.name,
        token_rewards_bt=rewards_et,
        mask_bt=batch.by_episode(whole_mask_bt),
        group_b=batch.group_e,
        **{name: batch.by_episode(values) if name.endswith("_bt") else values for name, values in known.items()},
        **algorithm.advantage.options,
    )
    advantages_bt, returns_bt = (batch.by_trajectory(each.float()) for each in (advantages_et, returns_et))
    check_finite("advantages", advantages_bt, whole_mask_bt, batch.whole_labels)
    check_finite("returns", returns_bt, whole_mask_bt, batch.whole_labels)
    weights_bt, values_bt = known.get("weights_bt"), known.get("values_bt")
    high_entropy_bt, threshold = _high_entropy(spec, batch, passes, keep_bt)
    inputs = LossInputs(
        mask_bt=batch.own_rows(keep_bt),
        advantages_bt=batch.own_rows(advantages_bt),
        rollout_bt=batch.rollout_bt,
        old_bt=old_bt,
        ref_bt=passes.ref_bt,
        weights_bt=None if weights_bt is None else batch.own_rows(weights_bt),
        high_entropy_bt=high_entropy_bt,
        selected_bt=_selected_tokens(spec, batch, known.get("old_logprobs_bt"), advantages_bt, keep_bt),
        values_bt=passes.values_bt,
        returns_bt=None if passes.values_bt is None else batch.own_rows(returns_bt),
        teacher_bt=batch.teacher_bt,
        teacher_top_btk=batch.teacher_top_btk,
    )
    rewards_e = rewards_et.sum(dim=-1)
    return inputs, Assessment(whole_mask_bt, rewards_e, advantages_bt, returns_bt, values_bt, corrected, threshold)


def _advantage_inputs(
    spec: JobSpec, batch: RankBatch, passes: ForwardResults, old_bt: Tensor | None
) -> dict[str, Tensor]:
    """What an advantage may read besides rewards, for the whole batch. Raises NonFinite."""
    wanted = find(AlgorithmKind.ADVANTAGE, spec.algorithm.advantage.name).inputs
    mine_bt = {
        "old_logprobs_bt": old_bt,
        "values_bt": passes.values_bt,
        "sum_pi_squared_bt": passes.sum_pi_squared_bt,
    }
    known = {name: batch.gather(values_bt) for name, values_bt in mine_bt.items() if values_bt is not None}
    if "rewards_bk" in wanted and spec.reward.parts:
        parts = [sample.reward_parts for sample in batch.samples]
        known["rewards_bk"] = _rows(batch, parts, len(spec.reward.parts), "rewards")[batch.division.last_of_episodes]
    if "greedy_rewards_b" in wanted:
        greedy = [(nan if sample.greedy_reward is None else sample.greedy_reward,) for sample in batch.samples]
        whole_bk = _rows(batch, greedy, 1, "rewards of greedy answers")
        known["greedy_rewards_b"] = whole_bk[batch.division.last_of_episodes, 0]
    if "turn_starts_bt" in wanted:
        known["turn_starts_bt"] = batch.gather(batch.turn_starts_bt)
    return known


def _high_entropy(
    spec: JobSpec, batch: RankBatch, passes: ForwardResults, keep_bt: Tensor
) -> tuple[Tensor | None, float | None]:
    """This rank's rows of the tokens of the highest entropy in the whole batch, and the smallest entropy among them."""
    if passes.entropy_bt is None:
        return None, None
    fraction = spec.algorithm.top_entropy_fraction
    highest_bt, threshold = high_entropy(batch.gather(passes.entropy_bt), keep_bt, fraction)
    return batch.own_rows(highest_bt), threshold


def _rows(batch: RankBatch, values: Sequence[tuple[float, ...]], width: int, what: str) -> Tensor:
    """The values of the whole batch, [trajectories, width]. Raises NonFinite."""
    mine_bk = torch.tensor(values, dtype=torch.float64, device=batch.device).view(-1, width)
    whole_bk = batch.gather_rows(mine_bk)
    check_finite(what, whole_bk, torch.ones_like(whole_bk, dtype=torch.bool), batch.whole_labels)
    return whole_bk


def _selected_tokens(
    spec: JobSpec, batch: RankBatch, whole_old_bt: Tensor | None, whole_advantages_bt: Tensor, whole_keep_bt: Tensor
) -> Tensor | None:
    """This rank's rows of the tokens that the loss treats differently; None for a loss without such tokens."""
    if whole_old_bt is None:
        return None
    selected_bt = selected_tokens(
        spec.algorithm.policy_loss.name,
        logprobs_bt=whole_old_bt,
        advantages_bt=whole_advantages_bt,
        mask_bt=whole_keep_bt,
        **spec.algorithm.policy_loss.options,
    )
    return None if selected_bt is None else batch.own_rows(selected_bt)


def token_rewards(spec: JobSpec, batch: RankBatch, old_bt: Tensor | None, ref_bt: Tensor | None) -> Tensor:
    """Rewards per token, float64 [rows, longest], so that equal sums of them are found equal.

    The reward and the overlong penalty are on the last sampled token of a trajectory, the reward of a turn is on the
    last token of that turn. The KL to the reference is subtracted on every token if the job has it in the reward.
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

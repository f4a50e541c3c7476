"""What a step's trajectories are worth: rewards, correction and advantages, over the whole batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor

from millrace.rl.advantages import advantage
from millrace.rl.checks import check_finite
from millrace.rl.corrections import correct
from millrace.rl.metrics.loss_metrics import summarised
from millrace.rl.policy_losses import picked_tokens
from millrace.rl.registry.catalogue import Kind, find
from millrace.spec import JobSpec
from services.trainer.protocol.backend import Backend
from services.trainer.protocol.microbatch import MicroBatch
from services.trainer.ranks import collectives
from services.trainer.step.batch import RankBatch
from services.trainer.step.loss import LossInputs
from services.trainer.step.metrics import Clock, batch_metrics
from services.trainer.step.rewards import token_rewards


@dataclass(frozen=True)
class ForwardResults:
    """What forward passes before the step gave of this rank's rows, [rows, longest]; none where none was made."""

    train_bt: Tensor | None
    """Log-probabilities under the weights as they are."""
    ref_bt: Tensor | None
    """Log-probabilities under the reference."""
    values_bt: Tensor | None = None
    """The critic's values."""
    sum_pi_squared_bt: Tensor | None = None


@dataclass(frozen=True)
class NeededPasses:
    train: bool
    reference: bool
    values: bool
    sum_pi_squared: bool


def passes_needed(spec: JobSpec, *, updates: int, policy_is_trained: bool = True) -> NeededPasses:
    """Which passes a step makes before its updates. With a single update the trainer's own would only repeat what the
    update computes anyway, unless something before it reads the values. Where the policy is not trained at all, there
    is no other pass to compare with the engine."""
    algorithm = spec.algorithm
    recomputed = algorithm.old_logprobs == "recompute"
    inputs = find(Kind.ADVANTAGE, algorithm.advantage.name).inputs
    read = {"old_logprobs_bt", "weights_bt"} & inputs
    read |= {"picked_bt"} & find(Kind.POLICY_LOSS, algorithm.policy_loss.name).inputs
    in_reward = algorithm.kl is not None and algorithm.kl_in == "reward"
    train = algorithm.correction is not None or (recomputed and (updates > 1 or bool(read) or in_reward))
    squares = "sum_pi_squared_bt" in inputs
    return NeededPasses(
        train=train or squares or not policy_is_trained,
        reference=algorithm.kl is not None,
        values=algorithm.critic is not None,
        sum_pi_squared=squares,
    )


def run_passes(spec: JobSpec, backend: Backend, batch: RankBatch, needed: NeededPasses, clock: Clock) -> ForwardResults:
    """Makes them. Raises NonFinite."""
    temperature = spec.rollout.temperature

    def logprobs(at: float, reference: bool = False) -> Tensor:
        whose = "log-probabilities of the reference" if reference else "log-probabilities"
        return _scored(batch, whose, lambda batches: backend.logprobs(batches, temperature=at, reference=reference))

    train_bt = ref_bt = values_bt = squares_bt = None
    with clock("old_log_prob"):
        if needed.train:
            train_bt = logprobs(temperature)
            if needed.sum_pi_squared:
                # With Z(τ) = Σ exp(logits/τ) it is Z(τ/2)/Z(τ)²: any token's log-probabilities at both tell it.
                squares_bt = (2 * train_bt - logprobs(temperature / 2)).exp()
    with clock("ref"):
        if needed.reference:
            ref_bt = logprobs(temperature, reference=True)
    if needed.values:
        assert backend.critic is not None
        with clock("values"):
            values_bt = _scored(batch, "values", backend.critic.values)
    return ForwardResults(train_bt, ref_bt, values_bt, squares_bt)


def _scored(batch: RankBatch, what: str, score: Callable[[Sequence[MicroBatch]], list[Tensor]]) -> Tensor:
    """[rows, longest]: of all of this rank's rows. Raises NonFinite on every rank where one has such a value."""
    microbatches = [microbatch for microbatches in batch.updates for microbatch in microbatches]
    scored_bt = batch.scattered(microbatches, score(microbatches))
    with collectives.fail_together():
        check_finite(what, scored_bt, batch.mask_bt, batch.labels)
    return scored_bt


def make_loss_inputs(spec: JobSpec, batch: RankBatch, passes: ForwardResults) -> tuple[LossInputs, dict[str, float]]:
    """What the loss reads of this rank's rows, and the batch's metrics. Exact whichever ranks a group's samples lie
    on: every rank computes it for the whole batch. Raises NonFinite, on all ranks alike."""
    algorithm, whole_mask_bt = spec.algorithm, batch.whole_mask_bt
    old_bt = batch.rollout_bt if algorithm.old_logprobs == "rollout" else passes.train_bt
    whole_rollout_bt = batch.whole(batch.rollout_bt)
    check_finite("log-probabilities of the engine", whole_rollout_bt, whole_mask_bt, batch.whole_labels)
    rewards_bt = batch.whole(token_rewards(spec, batch, old_bt, passes.ref_bt))
    check_finite("rewards", rewards_bt, whole_mask_bt, batch.whole_labels)
    known = _known(spec, batch, passes, old_bt)
    keep_bt, metrics = whole_mask_bt, {}
    if algorithm.correction is not None:
        assert passes.train_bt is not None
        known["weights_bt"], keep_bt, shares = correct(
            algorithm.correction.name,
            train_logprobs_bt=batch.whole(passes.train_bt),
            rollout_logprobs_bt=whole_rollout_bt,
            mask_bt=whole_mask_bt,
            **algorithm.correction.options,
        )
        metrics = summarised(shares)
    advantages_bt, returns_bt = advantage(
        algorithm.advantage.name,
        token_rewards_bt=rewards_bt,
        mask_bt=whole_mask_bt,
        group_b=batch.whole_group_b,
        **known,
        **algorithm.advantage.options,
    )
    check_finite("advantages", advantages_bt, whole_mask_bt, batch.whole_labels)
    check_finite("returns", returns_bt, whole_mask_bt, batch.whole_labels)
    columns = LossInputs(
        mask_bt=batch.mine(keep_bt),
        advantages_bt=batch.mine(advantages_bt),
        rollout_bt=batch.rollout_bt,
        old_bt=old_bt,
        ref_bt=passes.ref_bt,
        weights_bt=batch.mine(known["weights_bt"]) if "weights_bt" in known else None,
        picked_bt=_picked(spec, batch, known.get("old_logprobs_bt"), advantages_bt, keep_bt),
        values_bt=passes.values_bt,
        returns_bt=None if passes.values_bt is None else batch.mine(returns_bt),
    )
    told = batch_metrics(
        batch,
        rewards_bt=rewards_bt,
        advantages_bt=advantages_bt,
        values_bt=known.get("values_bt"),
        returns_bt=returns_bt,
    )
    return columns, metrics | told


def _known(spec: JobSpec, batch: RankBatch, passes: ForwardResults, old_bt: Tensor | None) -> dict[str, Any]:
    """What advantages may read beside rewards, of the whole batch. Raises NonFinite."""
    wanted = find(Kind.ADVANTAGE, spec.algorithm.advantage.name).inputs
    mine_bt = {
        "old_logprobs_bt": old_bt,
        "values_bt": passes.values_bt,
        "sum_pi_squared_bt": passes.sum_pi_squared_bt,
    }
    known = {name: batch.whole(values_bt) for name, values_bt in mine_bt.items() if values_bt is not None}
    if "rewards_bk" in wanted and spec.reward.parts:
        parts = [sample.reward_parts for sample in batch.samples]
        known["rewards_bk"] = _rows(batch, parts, len(spec.reward.parts), "rewards")
    if "greedy_rewards_b" in wanted:
        greedy = [(nan if sample.greedy_reward is None else sample.greedy_reward,) for sample in batch.samples]
        known["greedy_rewards_b"] = _rows(batch, greedy, 1, "rewards of greedy answers").squeeze(1)
    return known


def _rows(batch: RankBatch, values: Sequence[tuple[float, ...]], width: int, what: str) -> Tensor:
    """The whole batch's [trajectories, width]. Raises NonFinite."""
    mine_bk = torch.tensor(values, dtype=torch.float32, device=batch.device).view(-1, width)
    whole_bk = batch.whole_rows(mine_bk)
    check_finite(what, whole_bk, torch.ones_like(whole_bk, dtype=torch.bool), batch.whole_labels)
    return whole_bk


def _picked(
    spec: JobSpec, batch: RankBatch, whole_old_bt: Tensor | None, whole_advantages_bt: Tensor, whole_keep_bt: Tensor
) -> Tensor | None:
    """This rank's rows of the tokens that the loss treats apart; none where it knows of no such."""
    if whole_old_bt is None:
        return None
    picked_bt = picked_tokens(
        spec.algorithm.policy_loss.name,
        logprobs_bt=whole_old_bt,
        advantages_bt=whole_advantages_bt,
        mask_bt=whole_keep_bt,
        **spec.algorithm.policy_loss.options,
    )
    return None if picked_bt is None else batch.mine(picked_bt)

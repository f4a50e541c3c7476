"""What a step's trajectories are worth: rewards, correction and advantages, over the whole batch."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from millrace.rl.advantages import advantage
from millrace.rl.catalogue import Kind, find
from millrace.rl.checks import check_finite
from millrace.rl.corrections import correct
from millrace.rl.metrics import summarised
from millrace.rl.policy_losses import picked_tokens
from millrace.spec import JobSpec
from services.trainer import lockstep
from services.trainer.backends import Backend
from services.trainer.batch import Batch
from services.trainer.loss import Columns
from services.trainer.metrics import batch_metrics
from services.trainer.rewards import token_rewards


@dataclass(frozen=True)
class Passes:
    """Log-probabilities of this rank's rows before the step, [rows, longest]; none where no pass was made."""

    train_bt: Tensor | None
    ref_bt: Tensor | None


@dataclass(frozen=True)
class Needed:
    train: bool
    reference: bool


def passes_needed(spec: JobSpec, *, updates: int) -> Needed:
    """Which passes a step makes before its updates. With a single update the trainer's own would only repeat what the
    update computes anyway, unless something before it reads the values."""
    algorithm = spec.algorithm
    recomputed = algorithm.old_logprobs == "recompute"
    read = {"old_logprobs_bt", "weights_bt"} & find(Kind.ADVANTAGE, algorithm.advantage.name).inputs
    read |= {"picked_bt"} & find(Kind.POLICY_LOSS, algorithm.policy_loss.name).inputs
    in_reward = algorithm.kl is not None and algorithm.kl_in == "reward"
    train = algorithm.correction is not None or (recomputed and (updates > 1 or bool(read) or in_reward))
    return Needed(train, reference=algorithm.kl is not None)


def scored(spec: JobSpec, backend: Backend, batch: Batch, *, reference: bool) -> Tensor:
    """[rows, longest]: log-probabilities under the weights as they are, or the reference's. Raises NonFinite."""
    microbatches = [microbatch for microbatches in batch.updates for microbatch in microbatches]
    values = backend.logprobs(microbatches, temperature=spec.rollout.temperature, reference=reference)
    scored_bt = batch.scattered(microbatches, values)
    with lockstep.together():
        whose = "log-probabilities of the reference" if reference else "log-probabilities"
        check_finite(whose, scored_bt, batch.mask_bt, batch.labels)
    return scored_bt


def assess(spec: JobSpec, batch: Batch, passes: Passes) -> tuple[Columns, dict[str, float]]:
    """What the loss reads of this rank's rows, and the batch's metrics. Exact whichever ranks a group's samples lie
    on: every rank computes it for the whole batch. Raises NonFinite, on all ranks alike."""
    algorithm, whole_mask_bt = spec.algorithm, batch.whole_mask_bt
    old_bt = batch.rollout_bt if algorithm.old_logprobs == "rollout" else passes.train_bt
    whole_rollout_bt = batch.whole(batch.rollout_bt)
    check_finite("log-probabilities of the engine", whole_rollout_bt, whole_mask_bt, batch.whole_labels)
    rewards_bt = batch.whole(token_rewards(spec, batch, old_bt, passes.ref_bt))
    check_finite("rewards", rewards_bt, whole_mask_bt, batch.whole_labels)
    known: dict[str, Any] = {} if old_bt is None else {"old_logprobs_bt": batch.whole(old_bt)}
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
    advantages_bt, _ = advantage(
        algorithm.advantage.name,
        token_rewards_bt=rewards_bt,
        mask_bt=whole_mask_bt,
        group_b=batch.whole_group_b,
        **known,
        **algorithm.advantage.options,
    )
    check_finite("advantages", advantages_bt, whole_mask_bt, batch.whole_labels)
    columns = Columns(
        mask_bt=batch.mine(keep_bt),
        advantages_bt=batch.mine(advantages_bt),
        rollout_bt=batch.rollout_bt,
        old_bt=old_bt,
        ref_bt=passes.ref_bt,
        weights_bt=batch.mine(known["weights_bt"]) if "weights_bt" in known else None,
        picked_bt=_picked(spec, batch, known.get("old_logprobs_bt"), advantages_bt, keep_bt),
    )
    return columns, metrics | batch_metrics(batch, rewards_bt, advantages_bt, spec.rollout.max_response_tokens)


def _picked(
    spec: JobSpec, batch: Batch, whole_old_bt: Tensor | None, whole_advantages_bt: Tensor, whole_keep_bt: Tensor
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

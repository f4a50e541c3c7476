"""The metrics of a step under verl's names, exact over all ranks."""

import json
import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from millrace.engines import ENGINE_NAMES
from millrace.rl.registry.catalogue import AlgorithmKind, find
from millrace.spec import JobSpec
from millrace.telemetry.metrics import catalogue
from millrace.telemetry.metrics.declaration import Owner
from millrace.telemetry.metrics.histograms import ADVANTAGES, IMPORTANCE_RATIOS, Histogram, declared
from millrace.telemetry.metrics.step.mismatch import SPLIT
from services.trainer.algorithms.aggregation import BatchTotals, Rule, combined, rule_of, summarised
from services.trainer.algorithms.corrections import mismatch_metrics
from services.trainer.algorithms.losses import DISTILLATION_PREFIX
from services.trainer.ranks import collectives
from services.trainer.step.loss_inputs import Assessment

VERL = {
    "policy_loss": "actor/pg_loss",
    "clip_fraction": "actor/pg_clipfrac",
    "dual_clip_fraction": "actor/pg_clipfrac_lower",
    "approx_kl": "actor/ppo_kl",
    "kl_loss": "actor/kl_loss",
    "entropy": "actor/entropy",
    "value_loss": "critic/vf_loss",
    "value_clip_fraction": "critic/vf_clipfrac",
    "value_mean": "critic/vpred_mean",
}
"""verl's names of a loss's metrics. A metric that is not here is reported as `actor/<name>` or `critic/<name>`."""
VARIANCE_EPS = 1e-5
"""Added to the variance of the returns, as in verl."""
REDUCTIONS = {
    Rule.SUM: (dist.ReduceOp.SUM, 0.0),
    Rule.MAXIMUM: (dist.ReduceOp.MAX, -math.inf),
    Rule.MINIMUM: (dist.ReduceOp.MIN, math.inf),
}
"""How contributions of ranks are reduced, and the value of a rank that has none."""
OVER_UPDATES: dict[Rule, Callable[[Sequence[float]], float]] = {
    Rule.SUM: lambda values: sum(values) / len(values),
    Rule.MAXIMUM: max,
    Rule.MINIMUM: min,
}


def reported(spec: JobSpec, metrics: dict[str, float]) -> dict[str, float]:
    """The step's `metrics`, each key checked against its declaration in `millrace/telemetry/metrics`."""
    functions = [find(AlgorithmKind.POLICY_LOSS, spec.algorithm.policy_loss.name)]
    functions += [find(AlgorithmKind.CORRECTION, correction.name) for correction in spec.algorithm.corrections]
    if (distillation := spec.algorithm.distillation) is not None:
        functions.append(find(AlgorithmKind.DISTILLATION, distillation.loss.name))
    catalogue.check(metrics, [Owner.TRAINER], user_defined=any(function.is_user_defined for function in functions))
    return metrics


def over_ranks(contributions: Sequence[Mapping[str, Tensor]], group: ProcessGroup | None) -> dict[str, Tensor]:
    """The batch's metrics from the contributions of this rank's micro-batches and of all other ranks'. A collective."""
    total = {name: value.detach().double().cpu() for name, value in combined(contributions).items()}
    if group is None:
        return total
    own_shapes = {name: list(value.shape) for name, value in total.items()}
    shapes: dict[str, list[int]] = {}
    for answer in collectives.gather_bytes(json.dumps(own_shapes).encode()):
        shapes |= json.loads(answer)
    reduced = {}
    for name in sorted(shapes):
        operation, neutral = REDUCTIONS[rule_of(name)]
        value = total.get(name, torch.full(shapes[name], neutral, dtype=torch.float64))
        dist.all_reduce(value, operation, group=group)
        reduced[name] = value
    return reduced


def over_updates(updates: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """The step's metrics under their reported names, from those of its updates by model, `actor` and `critic`.

    Extremes are those of all updates; everything else is the mean over the updates that have it.
    """
    metrics = {}
    for learner in sorted({learner for update in updates for learner in update}):
        of_learner = [update[learner] for update in updates if learner in update]
        for name in sorted({name for update in of_learner for name in update}):
            values = [update[name] for update in of_learner if name in update]
            key = name if name.startswith(DISTILLATION_PREFIX) else VERL.get(name, f"{learner}/{name}")
            metrics[key] = OVER_UPDATES[rule_of(name)](values)
    return metrics


def batch_metrics(parts: Sequence[Assessment]) -> dict[str, float]:
    """Statistics of the rewards and advantages of a step's parts, of values and returns if there is a critic, and of
    the corrections."""
    counts = [part.mask_bt for part in parts]
    advantages = torch.cat([part.advantages_bt[part.mask_bt] for part in parts])
    distributions = {"critic/rewards": torch.cat([part.rewards_e for part in parts]), "critic/advantages": advantages}
    metrics = _correction_metrics(parts, sum(map(BatchTotals.of, counts), BatchTotals(0, 0)))
    for part in parts:
        if part.entropy_threshold is not None:
            metrics["actor/top_entropy_threshold"] = part.entropy_threshold
    valued = [
        (part.values_bt[mask_bt], part.returns_bt[mask_bt])
        for part, mask_bt in zip(parts, counts, strict=True)
        if part.values_bt is not None
    ]
    if valued:
        values, returns = (torch.cat(each).double() for each in zip(*valued, strict=True))
        distributions |= {"critic/values": values, "critic/returns": returns}
        if returns.numel() > 1:
            unexplained = (returns - values).var() / (returns.var() + VARIANCE_EPS)
            metrics["critic/vf_explained_var"] = float(1 - unexplained)
    for name, values in distributions.items():
        if values.numel():
            metrics |= {
                f"{name}/mean": float(values.mean()),
                f"{name}/max": float(values.max()),
                f"{name}/min": float(values.min()),
            }
    return metrics


def _correction_metrics(parts: Sequence[Assessment], totals: BatchTotals) -> dict[str, float]:
    corrected = [part.corrected for part in parts if part.corrected is not None]
    return summarised(combined(each.metrics(totals) for each in corrected))


def mismatch_by_part(
    train_bt: Tensor, rollout_bt: Tensor, mask_bt: Tensor, same_bt: Tensor, engine_b: Tensor
) -> dict[str, float]:
    """The metrics of `mismatch` for the whole batch, and those in `SPLIT` also for parts of it.

    `<metric>/same_version` covers the tokens of `same_bt`, which were sampled with exactly the weights that the trainer
    compares with: their difference comes from numerics alone, not from updates of the policy. `<metric>/<engine>` and
    `<metric>/same_version/<engine>` cover the tokens of one engine, if the batch is from several.

    `engine_b` [trajectories] counts into `ENGINE_NAMES`.
    """
    metrics = mismatch(train_bt, rollout_bt, mask_bt)
    made = sorted(set(engine_b.tolist()) - {-1})
    parts = {"/same_version": mask_bt & same_bt}
    for number in made if len(made) > 1 else []:
        of_engine_bt = mask_bt & (engine_b == number)[:, None]
        parts |= {
            f"/{ENGINE_NAMES[number]}": of_engine_bt,
            f"/same_version/{ENGINE_NAMES[number]}": of_engine_bt & same_bt,
        }
    for name, part_bt in parts.items():
        found = mismatch(train_bt, rollout_bt, part_bt)
        metrics |= {key + name: found[key] for key in SPLIT if key in found}
    return metrics


def mismatch(train_bt: Tensor, rollout_bt: Tensor, mask_bt: Tensor) -> dict[str, float]:
    """How far the trainer's log-probabilities are from the engine's, over the tokens of the mask. All are [B, T]."""
    train, rollout = train_bt[mask_bt].double(), rollout_bt[mask_bt].double()
    if not train.numel():
        return {}
    apart = (train.exp() - rollout.exp()).abs()
    return {
        "training/rollout_probs_diff_mean": float(apart.mean()),
        "training/rollout_probs_diff_max": float(apart.max()),
        "training/rollout_probs_diff_std": float(apart.std(unbiased=False)),
        "training/rollout_logprobs_diff_max": float((train - rollout).abs().max()),
        **summarised(mismatch_metrics(train_bt, rollout_bt, mask_bt)),
    }


def step_histograms(
    train_bt: Tensor, rollout_bt: Tensor, compared_bt: Tensor, advantages_bt: Tensor, mask_bt: Tensor
) -> dict[str, Histogram]:
    """The histograms of the whole step; all tensors are [trajectories, most sampled tokens]. `compared_bt`: the tokens
    of which both log-probabilities are known."""
    values = {
        IMPORTANCE_RATIOS: (train_bt[compared_bt].double() - rollout_bt[compared_bt].double()).exp(),
        ADVANTAGES: advantages_bt[mask_bt],
    }
    made = {declaration.key: declaration.of(own.cpu().numpy()) for declaration, own in values.items()}
    return declared({key: histogram for key, histogram in made.items() if histogram is not None}, Owner.TRAINER)

"""The losses of a micro-batch, aggregated, with their metrics: of the policy, of the critic, and of a teacher."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from millrace.rl.formulas.ratios import log_ratio
from millrace.rl.registry.catalogue import AlgorithmKind, find
from services.trainer.algorithms.aggregation import HISTOGRAM, BatchTotals, aggregate, histogram
from services.trainer.algorithms.functions import call_algorithm, errors_with_place, module_of

DISTILLATION_PREFIX = "distillation/"
"""Metrics of distillation losses are reported under names that begin so."""
LOSSES = frozenset({"policy_loss", "kl_loss", "value_loss", f"{DISTILLATION_PREFIX}loss"})
"""The metrics that are aggregated as the job says. All other means are over tokens."""


def policy_loss(
    name: str,
    *,
    logprobs_bt: Tensor,
    old_logprobs_bt: Tensor,
    advantages_bt: Tensor,
    mask_bt: Tensor,
    weights_bt: Tensor | None = None,
    aggregation: str = "token-mean",
    totals: BatchTotals | None = None,
    horizon: int | None = None,
    entropy_bt: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns this micro-batch's contribution to the loss, a scalar to minimise, and to its metrics, detached.

    Contributions of all micro-batches and ranks combine with `aggregation.combined`.

    logprobs_bt: float [B, T]; log-probability of each token under the policy being trained, with gradient.
    old_logprobs_bt: [B, T]; the same under the policy at the start of the step (the proximal policy). It gets no
        gradient.
    advantages_bt: [B, T].
    mask_bt: [B, T], true on tokens that count.
    weights_bt: [B, T]; multiplies the loss of each token, without gradient (importance weights of a correction).
    aggregation, totals, horizon: see `aggregation.aggregate`. Without totals the tensors are the whole batch.
    entropy_bt: [B, T]; the policy's entropy at each token, reported as `entropy`. See `entropy_bonus`.
    options: the loss's options, and the other tensors that it takes.

    Raises InvalidJob for an unknown name or option, or a missing tensor; ValueError for shapes that differ.
    """
    mask_bt = mask_bt.bool()
    totals = totals or BatchTotals.of(mask_bt)
    inputs = {"logprobs_bt": logprobs_bt, "old_logprobs_bt": old_logprobs_bt, "advantages_bt": advantages_bt}
    inputs |= {key: options.pop(key) for key in list(options) if isinstance(options[key], Tensor)}
    for key, value in inputs.items():
        if value.shape != mask_bt.shape:
            raise ValueError(f"{key} is {tuple(value.shape)} but mask_bt is {tuple(mask_bt.shape)}.")
        inputs[key] = (value if key == "logprobs_bt" else value.detach()).masked_fill(~mask_bt, 0)
    loss_bt, metrics_bt = call_algorithm(AlgorithmKind.POLICY_LOSS, name, {**inputs, "mask_bt": mask_bt}, options)
    if weights_bt is not None:
        loss_bt = loss_bt * weights_bt.detach().masked_fill(~mask_bt, 0)
    loss = aggregate(aggregation, loss_bt.expand_as(mask_bt), mask_bt, totals=totals, horizon=horizon)
    with torch.no_grad():
        if entropy_bt is not None:
            metrics_bt = {**metrics_bt, "entropy": entropy_bt.detach()}
        metrics = {
            key: aggregate("token-mean", metric_bt.to(loss_bt.dtype).expand_as(mask_bt), mask_bt, totals=totals)
            for key, metric_bt in metrics_bt.items()
        }
        metrics |= ratio_metrics(log_ratio(inputs["logprobs_bt"], inputs["old_logprobs_bt"]), mask_bt, totals)
    return loss, {**metrics, "policy_loss": loss.detach()}


@torch.no_grad()
def selected_tokens(
    name: str, *, logprobs_bt: Tensor, advantages_bt: Tensor, mask_bt: Tensor, **options: Any
) -> Tensor | None:
    """bool [B, T]: the tokens that the loss treats specially; None if the loss selects no tokens.

    The caller passes a step's whole batch and the old log-probabilities. Each micro-batch then gives its rows to
    `policy_loss` as `selected_bt`, so that the choice does not depend on how the batch was divided.
    """
    entry = find(AlgorithmKind.POLICY_LOSS, name)
    select: Callable[..., Tensor] | None = getattr(module_of(entry), "select", None)
    if select is None or "selected_bt" not in entry.inputs:
        return None
    mask_bt = mask_bt.bool()
    parameters = inspect.signature(select).parameters
    checked = {key: value for key, value in entry.check(options).items() if key in parameters}
    logprobs_bt, advantages_bt = logprobs_bt.masked_fill(~mask_bt, 0), advantages_bt.masked_fill(~mask_bt, 0)
    with errors_with_place(entry):
        return select(logprobs_bt=logprobs_bt, advantages_bt=advantages_bt, mask_bt=mask_bt, **checked)


def entropy_bonus(
    entropy_bt: Tensor,
    mask_bt: Tensor,
    *,
    coefficient: float,
    aggregation: str = "token-mean",
    totals: BatchTotals | None = None,
    horizon: int | None = None,
) -> Tensor:
    """The scalar −coefficient · entropy, which the caller adds to the loss. It carries the gradient of `entropy_bt`."""
    return -coefficient * aggregate(aggregation, entropy_bt, mask_bt, totals=totals, horizon=horizon)


def ratio_metrics(log_ratio_bt: Tensor, mask_bt: Tensor, totals: BatchTotals) -> dict[str, Tensor]:
    """Contributions to the metrics of the ratio π/π_old, from its logarithm, [B, T].

    KL(π_old‖π) as estimated by k1 and k3; mean, extremes and histogram of the ratio.
    """
    ratio_bt = log_ratio_bt.exp()
    return {
        "approx_kl": aggregate("token-mean", -log_ratio_bt, mask_bt, totals=totals),
        "approx_kl_k3": aggregate("token-mean", torch.expm1(log_ratio_bt) - log_ratio_bt, mask_bt, totals=totals),
        "ratio_mean": aggregate("token-mean", ratio_bt, mask_bt, totals=totals),
        "ratio_max": torch.where(mask_bt, ratio_bt, -torch.inf).amax(),
        "ratio_min": torch.where(mask_bt, ratio_bt, torch.inf).amin(),
        HISTOGRAM: histogram(log_ratio_bt, mask_bt),
    }


def value_loss(
    *,
    values_bt: Tensor,
    old_values_bt: Tensor,
    returns_bt: Tensor,
    mask_bt: Tensor,
    clip: float | None = 0.5,
    aggregation: str = "token-mean",
    totals: BatchTotals | None = None,
    horizon: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns this micro-batch's contribution to the value loss, a scalar to minimise, and to its metrics, detached.

    The loss of a token is 0.5·max((V − R)², (clip(V, V_old ± clip) − R)²), or 0.5·(V − R)² if `clip` is None. All
    tensors are [B, T]. `values_bt` carries the gradient; the advantages were computed from `old_values_bt`. For
    aggregation, totals and horizon see `aggregation.aggregate`.
    """
    mask_bt = mask_bt.bool()
    totals = totals or BatchTotals.of(mask_bt)
    values_bt = values_bt.masked_fill(~mask_bt, 0)
    old_values_bt = old_values_bt.detach().masked_fill(~mask_bt, 0)
    returns_bt = returns_bt.detach().masked_fill(~mask_bt, 0)
    squares_bt = (values_bt - returns_bt).square()
    is_clipped_bt = torch.zeros_like(mask_bt)
    if clip is not None:
        nearby_bt = torch.minimum(torch.maximum(values_bt, old_values_bt - clip), old_values_bt + clip)
        clipped_bt = (nearby_bt - returns_bt).square()
        is_clipped_bt = clipped_bt > squares_bt
        squares_bt = torch.maximum(squares_bt, clipped_bt)
    loss = 0.5 * aggregate(aggregation, squares_bt, mask_bt, totals=totals, horizon=horizon)
    metrics_bt = {
        "value_clip_fraction": is_clipped_bt.to(values_bt.dtype),
        "value_mean": values_bt,
        "return_mean": returns_bt,
        "value_square_error": (values_bt - returns_bt).square(),
    }
    metrics = {
        name: aggregate("token-mean", metric_bt.detach(), mask_bt, totals=totals)
        for name, metric_bt in metrics_bt.items()
    }
    return loss, {**metrics, "value_loss": loss.detach()}


def distillation_loss(
    name: str,
    *,
    logprobs_bt: Tensor,
    old_logprobs_bt: Tensor,
    teacher_logprobs_bt: Tensor,
    mask_bt: Tensor,
    weights_bt: Tensor | None = None,
    top_logprobs_btk: Tensor | None = None,
    teacher_top_logprobs_btk: Tensor | None = None,
    aggregation: str = "token-mean",
    totals: BatchTotals | None = None,
    horizon: int | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns this micro-batch's contribution to the loss, a scalar to minimise, and to its metrics, detached.

    logprobs_bt: float [B, T]; log-probability of each token under the policy being trained, with gradient.
    old_logprobs_bt: [B, T]; the same under the policy at the start of the step.
    teacher_logprobs_bt: [B, T]; the same under the teacher.
    mask_bt: [B, T], true on tokens that count.
    weights_bt: [B, T]; importance weights of a correction, for losses that take expectations over the sampled tokens.
    top_logprobs_btk: [B, T, K]; log-probabilities under the policy, with gradient, of the K tokens that the teacher
        thinks most likely in each place.
    teacher_top_logprobs_btk: [B, T, K]; those under the teacher.
    aggregation, totals, horizon: see `aggregation.aggregate`. Without totals the tensors are the whole batch.

    Raises InvalidJob for an unknown name or option, or a missing tensor; ValueError for shapes that differ.
    """
    mask_bt = mask_bt.bool()
    totals = totals or BatchTotals.of(mask_bt)
    given = {
        "logprobs_bt": logprobs_bt,
        "old_logprobs_bt": old_logprobs_bt.detach(),
        "teacher_logprobs_bt": teacher_logprobs_bt.detach(),
        "weights_bt": None if weights_bt is None else weights_bt.detach(),
        "top_logprobs_btk": top_logprobs_btk,
        "teacher_top_logprobs_btk": None if teacher_top_logprobs_btk is None else teacher_top_logprobs_btk.detach(),
    }
    inputs: dict[str, Tensor] = {"mask_bt": mask_bt}
    for key, value in given.items():
        if value is None:
            continue
        if value.shape[:2] != mask_bt.shape:
            raise ValueError(f"{key} is {tuple(value.shape)} but mask_bt is {tuple(mask_bt.shape)}.")
        inputs[key] = value.masked_fill(~mask_bt if value.dim() == 2 else ~mask_bt[..., None], 0)
    loss_bt, metrics_bt = call_algorithm(AlgorithmKind.DISTILLATION, name, inputs, options)
    loss = aggregate(aggregation, loss_bt.expand_as(mask_bt), mask_bt, totals=totals, horizon=horizon)
    with torch.no_grad():
        apart_bt = inputs["logprobs_bt"] - inputs["teacher_logprobs_bt"]
        metrics = {
            f"{DISTILLATION_PREFIX}{key}": aggregate("token-mean", value.to(loss_bt.dtype), mask_bt, totals=totals)
            for key, value in {**metrics_bt, "kl": apart_bt, "abs_logprob_diff": apart_bt.abs()}.items()
        }
    return loss, {**metrics, f"{DISTILLATION_PREFIX}loss": loss.detach()}

"""The policy loss that the job names, aggregated, with its metrics."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from services.trainer.algorithms.aggregation import BatchTotals, aggregate
from millrace.rl.formulas.ratios import log_ratio
from millrace.rl.metrics.loss_metrics import ratio_metrics
from millrace.rl.registry.catalogue import AlgorithmKind, find
from services.trainer.algorithms.functions import call_algorithm, module_of
from services.trainer.algorithms.user_functions import errors_with_place


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

    Contributions of all micro-batches and ranks combine with `metrics.combining.combined`.

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
    """bool [B, T]: the tokens that the loss treats specially; None where the loss selects no tokens.

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

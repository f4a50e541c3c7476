"""Policy losses: one file a loss.

A loss returns `(loss_bt, shares_bt)`: the loss a token and, by name, what to report a token (1.0 where it was clipped);
both are averaged here, so that each loss is exact over micro-batches and ranks without knowing of them. What a loss is
given is 0 where the mask is false.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from millrace.rl.aggregation import BatchTotals, aggregate
from millrace.rl.formulas.ratios import log_ratio
from millrace.rl.metrics.loss_metrics import ratio_metrics
from millrace.rl.registry.catalogue import Kind, find
from millrace.rl.registry.functions import call, module_of
from millrace.rl.registry.own import told


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
    """This micro-batch's share of the loss, a scalar to minimise, and of its metrics (see `metrics`), detached.

    logprobs_bt: float [B, T]; log-probability of each token under the policy being trained, with gradient.
    old_logprobs_bt: [B, T]; under the policy at the start of the step (the proximal policy). No gradient flows into it.
    advantages_bt: [B, T].
    mask_bt: [B, T], true on tokens that count.
    weights_bt: [B, T]; multiplies the loss a token, without gradient (importance weights of a correction).
    aggregation, totals, horizon: see `aggregation.aggregate`. Without totals this is the whole batch.
    entropy_bt: [B, T]; the policy's entropy at each token, reported as `entropy`. See `entropy_bonus`.
    options: the loss's own options and the further tensors that it takes.

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
    loss_bt, shares_bt = call(Kind.POLICY_LOSS, name, {**inputs, "mask_bt": mask_bt}, options)
    if weights_bt is not None:
        loss_bt = loss_bt * weights_bt.detach().masked_fill(~mask_bt, 0)
    loss = aggregate(aggregation, loss_bt.expand_as(mask_bt), mask_bt, totals=totals, horizon=horizon)
    with torch.no_grad():
        if entropy_bt is not None:
            shares_bt = {**shares_bt, "entropy": entropy_bt.detach()}
        metrics = {
            key: aggregate("token-mean", share_bt.to(loss_bt.dtype).expand_as(mask_bt), mask_bt, totals=totals)
            for key, share_bt in shares_bt.items()
        }
        metrics |= ratio_metrics(log_ratio(inputs["logprobs_bt"], inputs["old_logprobs_bt"]), mask_bt, totals)
    return loss, {**metrics, "policy_loss": loss.detach()}


@torch.no_grad()
def picked_tokens(
    name: str, *, logprobs_bt: Tensor, advantages_bt: Tensor, mask_bt: Tensor, **options: Any
) -> Tensor | None:
    """[B, T], bool: the tokens that the loss treats apart, chosen over what is given; none if it knows of no such.

    To be called with a step's whole batch and the old log-probabilities; each micro-batch then passes its rows to
    `policy_loss` as `picked_bt`, and the choice does not depend on how the batch was split.
    """
    entry = find(Kind.POLICY_LOSS, name)
    pick = getattr(module_of(entry), "pick", None)
    if pick is None or "picked_bt" not in entry.inputs:
        return None
    mask_bt = mask_bt.bool()
    wanted = inspect.signature(pick).parameters
    checked = {key: value for key, value in entry.check(options).items() if key in wanted}
    logprobs_bt, advantages_bt = logprobs_bt.masked_fill(~mask_bt, 0), advantages_bt.masked_fill(~mask_bt, 0)
    with told(entry):
        return pick(logprobs_bt=logprobs_bt, advantages_bt=advantages_bt, mask_bt=mask_bt, **checked)


def entropy_bonus(
    entropy_bt: Tensor,
    mask_bt: Tensor,
    *,
    coefficient: float,
    aggregation: str = "token-mean",
    totals: BatchTotals | None = None,
    horizon: int | None = None,
) -> Tensor:
    """The scalar −coefficient · entropy, to be added to the loss; it carries entropy_bt's gradient."""
    return -coefficient * aggregate(aggregation, entropy_bt, mask_bt, totals=totals, horizon=horizon)

"""The loss that brings the policy nearer to a teacher, by the name that the job gives."""

from typing import Any

import torch
from torch import Tensor

from services.trainer.algorithms.aggregation import BatchTotals, aggregate
from millrace.rl.registry.catalogue import AlgorithmKind
from services.trainer.algorithms.functions import call_algorithm

PREFIX = "distillation/"
"""Metrics of these losses are reported under names that begin so."""


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
            f"{PREFIX}{key}": aggregate("token-mean", value.to(loss_bt.dtype), mask_bt, totals=totals)
            for key, value in {**metrics_bt, "kl": apart_bt, "abs_logprob_diff": apart_bt.abs()}.items()
        }
    return loss, {**metrics, f"{PREFIX}loss": loss.detach()}

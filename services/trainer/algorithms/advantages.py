"""Advantages of a batch, by the estimator that the job names."""

from typing import Any

import torch
from torch import Tensor

from millrace.rl.registry.catalogue import AlgorithmKind
from services.trainer.algorithms.functions import call_algorithm


@torch.no_grad()
def advantage(
    name: str,
    *,
    token_rewards_bt: Tensor,
    mask_bt: Tensor,
    group_b: Tensor,
    values_bt: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Returns advantages and returns, both [B, T] in the rewards' dtype, by the estimator `name`.

    Everything is computed in float64: in float32 equal rewards that were earned in another order, or in other parts,
    have different sums, and a group's standard deviation makes such a difference large. The caller passes a step's
    whole batch, because group and batch statistics are computed over these tensors.

    token_rewards_bt: float [B, T], float64 where rewards have several parts; the reward of an outcome is at the last
        generated token. Rewards where the mask is false are not read.
    mask_bt: [B, T], true for generated tokens, false for observations between turns. A row is an episode: the tokens
        of its trajectories follow each other, so that baselines count episodes, and what is summed up to the end of
        the episode goes on from one trajectory to the next.
    group_b: integer [B]; equal for the episodes of one prompt.
    values_bt: float [B, T]; the critic's values, for estimators that need them.
    options: the estimator's options, and the other tensors that it takes.

    Raises InvalidJob for an unknown name or option, or a missing tensor.
    """
    mask_bt = mask_bt.bool()
    inputs = {"token_rewards_bt": token_rewards_bt, "values_bt": values_bt, "group_b": group_b}
    inputs |= {key: options.pop(key) for key in list(options) if isinstance(options[key], Tensor)}
    exact = {
        key: value.double() if value.is_floating_point() else value
        for key, value in inputs.items()
        if value is not None
    }
    blanked = {key: torch.where(mask_bt, value, 0) if key.endswith("_bt") else value for key, value in exact.items()}
    both = call_algorithm(AlgorithmKind.ADVANTAGE, name, {**blanked, "mask_bt": mask_bt}, options)
    advantages_bt, returns_bt = (torch.where(mask_bt, each, 0).to(token_rewards_bt.dtype) for each in both)
    return advantages_bt, returns_bt

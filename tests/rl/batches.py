"""Batches for the tests of the algorithms: ragged, with observations between turns and one sequence that counts not."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One step's tensors, float64. What stands where the mask is false is NaN unless said otherwise."""

    logprobs_bt: Tensor
    old_logprobs_bt: Tensor
    rollout_logprobs_bt: Tensor
    advantages_bt: Tensor
    token_rewards_bt: Tensor
    values_bt: Tensor
    mask_bt: Tensor
    group_b: Tensor

    def rows(self, index: list[int]) -> "Batch":
        return Batch(**{name: value[index] for name, value in vars(self).items()})

    def padded(self, columns: int) -> "Batch":
        """With so many more columns of garbage at the end."""
        wider = {}
        for name, value in vars(self).items():
            if value.dim() == 2:
                filler = False if value.dtype == torch.bool else math.nan
                value = torch.nn.functional.pad(value, (0, columns), value=filler)
            wider[name] = value
        return Batch(**wider)

    def to(self, dtype: torch.dtype) -> "Batch":
        return replace(
            self, **{name: value.to(dtype) for name, value in vars(self).items() if value.is_floating_point()}
        )

    def on(self, device: str) -> "Batch":
        return Batch(**{name: value.to(device) for name, value in vars(self).items()})


def make_batch(seed: int = 0, *, drift: float = 0.4, sequence_advantages: bool = False) -> Batch:
    """Two groups of four, one of one, and a sequence without any token; `drift` is how far the policies are apart."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = [7, 3, 5, 1, 6, 7, 2, 4, 5, 0]
    group_b = torch.tensor([4, 9, 4, 9, 4, 9, 4, 9, 2, 4])
    rows, columns = len(lengths), 8
    mask_bt = torch.arange(columns) < torch.tensor(lengths)[:, None]
    mask_bt[0, 2:4] = False  # an observation between two turns
    mask_bt[5, 0] = False
    old_bt = -normal(rows, columns).abs() - 0.05
    logprobs_bt = (old_bt + drift * normal(rows, columns)).clamp(max=-0.01)
    advantages_bt = normal(rows, 1).expand(rows, columns) if sequence_advantages else normal(rows, columns)
    tensors = {
        "logprobs_bt": logprobs_bt,
        "old_logprobs_bt": old_bt,
        "rollout_logprobs_bt": (old_bt + 0.3 * normal(rows, columns)).clamp(max=-0.01),
        "advantages_bt": advantages_bt,
        "token_rewards_bt": normal(rows, columns),
        "values_bt": normal(rows, columns),
    }
    blanked = {name: torch.where(mask_bt, value, math.nan) for name, value in tensors.items()}
    return Batch(**blanked, mask_bt=mask_bt, group_b=group_b)


def ragged(values_bt: Tensor, mask_bt: Tensor) -> list[list[float]]:
    """The values that count, as plain numbers, a list a sequence."""
    return [values[mask].tolist() for values, mask in zip(values_bt, mask_bt, strict=True)]

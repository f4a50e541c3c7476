"""Statistics over the samples of one prompt, a group. Any integer may name a group; its samples may be in any rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.drops import equal


@dataclass(frozen=True)
class Groups:
    """Which sequences belong together. Padding sequences (`valid_b` is false) are in no group."""

    index_b: Tensor
    """The number of each sequence's group, counted from 0."""
    valid_b: Tensor
    """bool: whether the sequence has a token that counts."""
    sizes_b: Tensor
    """The number of valid sequences in each sequence's group."""

    @classmethod
    def of(cls, group_b: Tensor, mask_bt: Tensor) -> "Groups":
        """The groups of sequences with group names `group_b` and masks `mask_bt`."""
        valid_b = mask_bt.bool().any(dim=-1)
        _, index_b = torch.unique(group_b.to(valid_b.device), return_inverse=True)
        counts_g = torch.zeros(group_b.numel(), dtype=torch.long, device=valid_b.device)
        counts_g.index_add_(0, index_b, valid_b.long())
        return cls(index_b, valid_b, counts_g[index_b])

    def sum(self, values_b: Tensor) -> Tensor:
        """[B, ...]: the sum over each sequence's group."""
        counted = torch.where(self._aligned(self.valid_b, values_b), values_b, 0)
        sums_g = torch.zeros_like(values_b).index_add_(0, self.index_b, counted)
        return sums_g[self.index_b]

    def mean(self, values_b: Tensor) -> Tensor:
        """[B, ...]: the mean over each sequence's group."""
        return self.sum(values_b) / self._counts(values_b).clamp(min=1)

    def std(self, values_b: Tensor, ddof: int) -> Tensor:
        """[B, ...]: the standard deviation with divisor size − ddof; 0 for groups of at most `ddof` samples."""
        squares = self.sum((values_b - self.mean(values_b)).square())
        return (squares / (self._counts(values_b) - ddof).clamp(min=1)).sqrt()

    def max(self, values_b: Tensor) -> Tensor:
        """[B, ...]: the largest value in each sequence's group."""
        lowest = torch.finfo(values_b.dtype).min
        index = self._aligned(self.index_b, values_b).expand_as(values_b)
        candidates = torch.where(self._aligned(self.valid_b, values_b), values_b, lowest)
        tops_g = torch.full_like(values_b, lowest).scatter_reduce_(0, index, candidates, "amax")
        return tops_g[self.index_b]

    def are_equal(self, values_b: Tensor) -> Tensor:
        """[B, ...] bool: whether all values of each sequence's group are equal, as `equal` decides."""
        found: Tensor = equal(-self.max(-values_b), self.max(values_b))
        return found

    def centred(self, values_b: Tensor, singleton: str) -> Tensor:
        """[B, ...]: value − group mean. A group of one gives 0 (`singleton` "zero") or the value itself ("reward").

        Where all values of a group are equal the result is exactly 0, because a rounding error divided by their
        standard deviation could become large.
        """
        centred_b = torch.where(self.are_equal(values_b), 0, values_b - self.mean(values_b))
        if singleton == "reward":
            centred_b = torch.where(self._aligned(self.sizes_b == 1, values_b), values_b, centred_b)
        return centred_b

    def scaled(self, centred_b: Tensor, values_b: Tensor, ddof: int, eps: float) -> Tensor:
        """[B, ...]: centred / (standard deviation of the group's values + eps); unchanged in groups of one."""
        several = self._aligned(self.sizes_b > 1, values_b)
        return centred_b / (self.std(values_b, ddof) + eps).where(several, 1)

    def _counts(self, values_b: Tensor) -> Tensor:
        return self._aligned(self.sizes_b.to(values_b.dtype), values_b)

    @staticmethod
    def _aligned(per_sequence_b: Tensor, values_b: Tensor) -> Tensor:
        return per_sequence_b.view(-1, *([1] * (values_b.dim() - 1)))


def on_tokens(advantages_b: Tensor, mask_bt: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (advantages_bt, returns_bt) of an estimator that gives all tokens of an answer the same advantage."""
    advantages_bt = advantages_b[:, None] * mask_bt
    return advantages_bt, advantages_bt

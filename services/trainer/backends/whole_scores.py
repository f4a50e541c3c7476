"""Token scores of a micro-batch whose tokens several ranks share: each rank scores some, every rank gets all."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


def gather_scores(mine_kr: Tensor, counts: tuple[int, ...], group: ProcessGroup | None) -> Tensor:
    """The scores of all ranks of the group, [k, R of all], in the order of the ranks.

    mine_kr: this rank's scores, [k, R of this rank]. counts: number of tokens that each rank scored. All ranks compute
    the same loss from the result. Each keeps the gradient of its own scores, so the sum of the ranks' gradients of a
    weight is its gradient.
    """
    if group is None or not any(counts):
        return mine_kr
    scores_kr: Tensor = _Gathered.apply(mine_kr, counts, group)  # type: ignore[no-untyped-call]
    return scores_kr


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine_kr: Tensor, counts: tuple[int, ...], group: ProcessGroup) -> Tensor:
        ctx.first = sum(counts[: group.rank()])
        ctx.count = mine_kr.shape[1]
        padded = mine_kr.new_zeros(mine_kr.shape[0], max(counts))
        padded[:, : ctx.count] = mine_kr
        everyone = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(everyone, padded, group=group)
        return torch.cat([part[:, :count] for part, count in zip(everyone, counts, strict=True)], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kr: Tensor) -> Any:
        return grad_kr[:, ctx.first : ctx.first + ctx.count], None, None

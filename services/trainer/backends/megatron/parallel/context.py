"""Context parallelism: each rank scores the tokens of its slices, and the loss is computed over whole sequences."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd.function import once_differentiable

from services.trainer.backends.megatron.parallel.packing import PackedBatch


def whole_scores(mine_2r: Tensor, packed: PackedBatch) -> Tensor:
    """The scores of all context-parallel ranks, [2, R], in the order of the micro-batch.

    All ranks compute the same loss. Each keeps the gradient of its part; these are summed with the gradients of
    data parallelism.
    """
    if packed.order_r is None:
        return mine_2r
    by_rank_2r: Tensor = _Gathered.apply(mine_2r, packed.counts)  # type: ignore[no-untyped-call]
    return by_rank_2r[:, packed.order_r]


class _Gathered(torch.autograd.Function):
    """Concatenates the scores of all ranks; the gradient of a rank is its slice."""

    @staticmethod
    def forward(ctx: Any, mine_2r: Tensor, counts: tuple[int, ...]) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        ctx.first = sum(counts[: group.rank()])
        ctx.count = mine_2r.shape[1]
        padded = mine_2r.new_zeros(2, max(counts))
        padded[:, : ctx.count] = mine_2r
        everyone = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(everyone, padded, group=group)
        return torch.cat([part[:, :count] for part, count in zip(everyone, counts, strict=True)], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_2r: Tensor) -> Any:
        return grad_2r[:, ctx.first : ctx.first + ctx.count], None

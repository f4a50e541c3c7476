"""Context parallelism: each rank scores the tokens of its slices, and the loss is computed over whole sequences."""

from megatron.core import parallel_state
from torch import Tensor

from services.trainer.backends.megatron.parallel.packing import PackedBatch
from services.trainer.backends.whole_scores import gather_scores


def whole_scores(mine_kr: Tensor, packed: PackedBatch) -> Tensor:
    """The scores of all context-parallel ranks, [2 + K, R], in the order of the micro-batch.

    All ranks compute the same loss. Each keeps the gradient of its part; these are summed with the gradients of
    data parallelism.
    """
    if packed.order_r is None:
        return mine_kr
    by_rank_kr = gather_scores(mine_kr, packed.counts, parallel_state.get_context_parallel_group())
    return by_rank_kr[:, packed.order_r]

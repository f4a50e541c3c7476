"""How evenly the routers spread the tokens over the experts, and the auxiliary loss for that."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn


class LoadMeter:
    """Counts, in training passes, the tokens that each router of this rank sends to each expert."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
        self._counts: dict[TopKRouter, Tensor] = {}
        for router in routers:
            router.register_forward_hook(self._count)

    def clear(self) -> None:
        self._counts = {}

    def metrics(self) -> dict[str, float]:
        """moe/load_max: tokens of the busiest expert of any layer by the mean; moe/load_idle: share of experts without
        a token. 0 where no router of this rank has run."""
        if not self._counts:
            return {"moe/load_max": 0.0, "moe/load_idle": 0.0}
        loads = torch.stack([counts.float() / counts.float().mean() for counts in self._counts.values()])
        return {"moe/load_max": float(loads.max()), "moe/load_idle": float((loads == 0).float().mean())}

    @torch.no_grad()
    def _count(self, router: TopKRouter, inputs: object, outputs: tuple[Tensor, Tensor]) -> None:
        if not outputs[0].requires_grad:
            return  # scoring, or the first of two passes where activations are computed again
        _, chosen_te = outputs
        total = chosen_te.sum(dim=0)
        self._counts[router] = self._counts[router] + total if router in self._counts else total


def auxiliary_loss(balancing: str, layers: int, microbatches: int) -> float:
    """Mean over micro-batches, data-parallel ranks and the `layers` with experts, without its coefficient, since it was
    last asked for. A collective of all ranks."""
    tracked = get_moe_layer_wise_logging_tracker()
    total = torch.zeros(1, dtype=torch.float32, device=torch.cuda.current_device())
    for losses in tracked.values():
        total += losses["values"].sum()
    tracked.clear()
    # Ranks that share a batch have parts of its loss; the global one has its parts on all ranks.
    dist.all_reduce(total)
    batches = 1 if balancing == "global_aux_loss" else parallel_state.get_data_parallel_world_size()
    return float(total) / (batches * microbatches * layers)

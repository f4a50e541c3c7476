"""How evenly the routers spread the tokens over the experts, and the auxiliary loss for that."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from services.trainer.protocol.microbatch import MicroBatch


class LoadMeter:
    """Counts, in training passes, the tokens that each router sends to each expert."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
        self._counts: dict[TopKRouter, Tensor] = {}
        for router in self._routers:
            router.register_forward_hook(self._count)

    def clear(self) -> None:
        self._counts = {}

    def metrics(self) -> dict[str, float]:
        """moe/load_max: tokens of the busiest expert of any layer of this stage by the mean; moe/load_idle: share of
        experts without a token. Over the whole batch: a collective of the ranks of the stage. 0 where it has no
        experts."""
        if not self._routers:
            return {"moe/load_max": 0.0, "moe/load_idle": 0.0}
        experts, device = self._routers[0].config.num_moe_experts, torch.cuda.current_device()
        none = torch.zeros(experts, device=device)
        counts_le = torch.stack([self._counts.get(router, none).float() for router in self._routers])
        dist.all_reduce(counts_le, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        loads_le = counts_le / counts_le.mean(dim=1, keepdim=True).clamp(min=1e-9)
        return {"moe/load_max": float(loads_le.max()), "moe/load_idle": float((loads_le == 0).float().mean())}

    @torch.no_grad()
    def _count(self, router: TopKRouter, inputs: object, outputs: tuple[Tensor, Tensor]) -> None:
        if not outputs[0].requires_grad:
            return  # scoring, or the first of two passes where activations are computed again
        _, chosen_te = outputs
        total = chosen_te.sum(dim=0)
        self._counts[router] = self._counts[router] + total if router in self._counts else total


def replayed(batches: Sequence[MicroBatch]) -> float:
    """Share of this rank's tokens whose experts the engine told."""
    tokens = sum(len(batch.tokens_p) for batch in batches)
    told = sum(int((batch.experts_plk[:, 0, 0] >= 0).sum()) for batch in batches if batch.experts_plk is not None)
    return told / max(1, tokens)


def forget(chunks: Sequence[nn.Module]) -> None:
    """After a pass. Megatron's dispatchers keep its probabilities, and with them a graph that leads through C++, which
    Python's collector does not see, back to the model: that would outlive its job, with all its memory."""
    for dispatcher in (
        module.token_dispatcher for c in chunks for module in c.modules() if isinstance(module, MoELayer)
    ):
        for owner in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
            for name, value in list(vars(owner).items()) if owner is not None else ():
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    setattr(owner, name, None)


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

"""How evenly the routers distribute tokens over the experts, and the auxiliary loss for it."""

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
    """Counts the tokens that each router sends to each expert in training passes."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
        self._counts: dict[TopKRouter, Tensor] = {}
        for router in self._routers:
            router.register_forward_hook(self._count)

    def clear(self) -> None:
        """Sets all counts to 0."""
        self._counts = {}

    def metrics(self) -> dict[str, float]:
        """Metrics over the whole batch; 0 where this pipeline stage has no experts. A collective of the stage's ranks.

        moe/load_max: tokens of the busiest expert of any layer, divided by the layer's mean. moe/load_idle: share of
        experts without a token.
        """
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
            return  # scoring, or the first of two passes with recomputed activations
        _, chosen_te = outputs
        total = chosen_te.sum(dim=0)
        self._counts[router] = self._counts[router] + total if router in self._counts else total


def replayed_share(batches: Sequence[MicroBatch]) -> float:
    """Share of this rank's tokens whose experts were chosen by the engine."""
    tokens = sum(len(batch.tokens_p) for batch in batches)
    replayed_tokens = sum(
        int((batch.experts_plk[:, 0, 0] >= 0).sum()) for batch in batches if batch.experts_plk is not None
    )
    return replayed_tokens / max(1, tokens)


def free_dispatchers(chunks: Sequence[nn.Module]) -> None:
    """Frees what Megatron's dispatchers keep of a pass.

    They keep probabilities, whose graph leads through C++, which Python's garbage collector does not see, back to the
    model: the model and all its memory would outlive the job.
    """
    for dispatcher in (
        module.token_dispatcher for c in chunks for module in c.modules() if isinstance(module, MoELayer)
    ):
        for owner in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
            for name, value in list(vars(owner).items()) if owner is not None else ():
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    setattr(owner, name, None)


def auxiliary_loss(balancing: str, layers: int, microbatches: int) -> float:
    """The auxiliary loss without its coefficient: its mean over micro-batches, data-parallel ranks and the `layers`
    with experts, since the last call. A collective of all ranks."""
    tracked = get_moe_layer_wise_logging_tracker()
    total = torch.zeros(1, dtype=torch.float32, device=torch.cuda.current_device())
    for losses in tracked.values():
        total += losses["values"].sum()
    tracked.clear()
    # Ranks that share a batch have parts of its loss. Of the global loss all ranks have a part.
    dist.all_reduce(total)
    batches = 1 if balancing == "global_aux_loss" else parallel_state.get_data_parallel_world_size()
    return float(total) / (batches * microbatches * layers)

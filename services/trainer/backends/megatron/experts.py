"""Layers with experts: how evenly the routers distribute tokens over them, the auxiliary loss for it, and router replay
(arXiv 2510.11370): tokens go to the experts to which the engine sent them, with the weights of the trainer's router. If
the engine reported no expert, the trainer's router chooses.

The engine's choices are passed through all layers with the packing of a micro-batch, so that a layer with recomputed
activations routes the same in both passes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from millrace.megatron.architectures.shape import ExpertShape
from services.trainer.backends.megatron.packing import PackedTokens
from services.trainer.protocol.microbatch import MicroBatch


class ReplayedChoice:
    """Replaces the choice of one router. Has the interface of megatron.core's RouterReplay."""

    replayed_tk: Tensor | None = None
    """The engine's choices for the layer, int64 [tokens, experts per token]; None: the router chooses."""

    def get_replay_topk(
        self,
        scores_te: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        values_tk, own_tk = default_compute_topk(scores_te, topk, num_groups=num_groups, group_topk=group_topk)
        if self.replayed_tk is None:
            return values_tk, own_tk
        chosen_tk = torch.where(self.replayed_tk < 0, own_tk, self.replayed_tk)
        return scores_te.gather(1, chosen_tk), chosen_tk


def install(chunks: Sequence[nn.Module], layers: Sequence[range], experts: ExpertShape) -> None:
    """Installs replay in the routers of all chunks. `layers`: the layers of the model that each chunk has."""
    for chunk, mine in zip(chunks, layers, strict=True):
        for layer, module in zip(mine, chunk.decoder.layers, strict=True):  # type: ignore[union-attr, arg-type]
            if not experts.layers[layer]:
                continue
            choice = ReplayedChoice()
            for router in (part for part in module.modules() if isinstance(part, TopKRouter)):
                router.router_replay = choice
            order = sum(experts.layers[:layer])
            module.register_forward_pre_hook(partial(_set_choices, choice, order), with_kwargs=True)


def _set_choices(
    choice: ReplayedChoice, order: int, layer: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]
) -> None:
    """Hook before a layer's forward pass: gives its router the choices for the tokens of this rank."""
    packed = named.get("packed_seq_params")
    replayed_ltk = packed.experts_ltk if isinstance(packed, PackedTokens) else None
    split = layer.config.sequence_parallel
    choice.replayed_tk = None if replayed_ltk is None else _own_part(replayed_ltk[order], split).long()


def _own_part(replayed_tk: Tensor, split: bool) -> Tensor:
    """This rank's part of the choices, if tensor-parallel ranks split the tokens (sequence parallelism)."""
    if not split:
        return replayed_tk
    rank: int = parallel_state.get_tensor_model_parallel_rank()
    return replayed_tk.chunk(parallel_state.get_tensor_model_parallel_world_size())[rank]


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
        """Metrics over the whole batch; 0 if this pipeline stage has no experts. A collective of the stage's ranks.

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


def _take_losses() -> list[Tensor]:
    """What Megatron has added up of each auxiliary loss, by layer, since the last call."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ModuleNotFoundError:  # megatron-core 0.16
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        tracked = get_moe_layer_wise_logging_tracker()
        found = [losses["values"] for losses in tracked.values()]
    else:
        tracked = get_moe_metrics_tracker().metrics
        found = [losses.values for losses in tracked.values()]
    tracked.clear()
    return found


def auxiliary_loss(balancing: str, layers: int, microbatches: int) -> float:
    """The auxiliary loss without its coefficient: its mean over micro-batches, data-parallel ranks and the `layers`
    with experts, since the last call. A collective of all ranks."""
    total = torch.zeros(1, dtype=torch.float32, device=torch.cuda.current_device())
    for losses in _take_losses():
        total += losses.sum()
    # Ranks that share a batch have parts of its loss. Of the global loss all ranks have a part.
    dist.all_reduce(total)
    batches = 1 if balancing == "global_aux_loss" else parallel_state.get_data_parallel_world_size()
    return float(total) / (batches * microbatches * layers)

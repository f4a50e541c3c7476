"""Router replay (arXiv 2510.11370): tokens go to the experts to which the engine sent them, with the weights of the
trainer's router. Where the engine reported no expert, the trainer's router chooses.

The choices are passed through all layers with the packing of a micro-batch, so that a layer with recomputed activations
routes the same in both passes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from millrace.megatron.architectures.shape import ExpertShape


@dataclass
class PackedTokens(PackedSeqParams):  # type: ignore[misc]  # megatron has no types
    """Megatron's description of packed sequences, with the engine's choices of experts for the tokens of this rank."""

    experts_ltk: Tensor | None = None
    """int [MoE layers of the model, tokens, experts per token]; negative where the engine reported nothing."""


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
    """This rank's part of the choices, where tensor-parallel ranks split the tokens (sequence parallelism)."""
    if not split:
        return replayed_tk
    rank: int = parallel_state.get_tensor_model_parallel_rank()
    return replayed_tk.chunk(parallel_state.get_tensor_model_parallel_world_size())[rank]

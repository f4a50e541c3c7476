"""Router replay (arXiv 2510.11370): tokens go to the experts that the engine sent them to, weighted as the router here
weighs them. What the engine did not tell of a token, the router chooses.

The choices travel with a micro-batch's packing through all layers, so that a layer whose activations are computed again
routes as it did the first time.
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
class PackedTokens(PackedSeqParams):
    """Megatron's description of packed sequences, and the engine's choices for the tokens of this rank."""

    experts_ltk: Tensor | None = None
    """int [MoE layers of the model, tokens, experts a token]; negative where the engine told nothing."""


class ReplayedChoice:
    """In the place of one router's own choice. What `megatron.core` calls a RouterReplay."""

    told_tk: Tensor | None = None

    def get_replay_topk(
        self,
        scores_te: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        values_tk, own_tk = default_compute_topk(scores_te, topk, num_groups=num_groups, group_topk=group_topk)
        if self.told_tk is None:
            return values_tk, own_tk
        chosen_tk = torch.where(self.told_tk < 0, own_tk, self.told_tk)
        return scores_te.gather(1, chosen_tk), chosen_tk


def install(chunks: Sequence[nn.Module], layers: Sequence[range], experts: ExpertShape) -> None:
    """`layers`: which of the model's layers each chunk has."""
    for chunk, mine in zip(chunks, layers, strict=True):
        for layer, module in zip(mine, chunk.decoder.layers, strict=True):  # type: ignore[union-attr, arg-type]
            if not experts.layers[layer]:
                continue
            choice = ReplayedChoice()
            for router in (part for part in module.modules() if isinstance(part, TopKRouter)):
                router.router_replay = choice
            order = sum(experts.layers[:layer])
            module.register_forward_pre_hook(partial(_tell, choice, order), with_kwargs=True)


def _tell(choice: ReplayedChoice, order: int, layer: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    packed = named.get("packed_seq_params")
    told_ltk = packed.experts_ltk if isinstance(packed, PackedTokens) else None
    choice.told_tk = None if told_ltk is None else _mine(told_ltk[order], layer.config.sequence_parallel).long()


def _mine(told_tk: Tensor, split: bool) -> Tensor:
    """Of the tokens that tensor-parallel ranks share out between the matrices, this rank's."""
    if not split:
        return told_tk
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    return told_tk.chunk(size)[rank]

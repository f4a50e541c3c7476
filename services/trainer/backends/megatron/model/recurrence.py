"""The layer of GatedDeltaNet (arXiv 2412.06464) in Megatron's transformer, over packed sequences.

megatron-core 0.16 has one that takes no packed sequences, and neither release's runs without flash-linear-attention.
Here convolution and recurrence are those of transformers, as on FSDP2 (`backends.recurrence`); the projections before
and after them are Megatron's. Tensor-parallel ranks divide the heads: a value head depends on its key head alone.
"""

import functools
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from millrace.megatron.architectures.shape import Recurrence
from services.trainer.backends.megatron.packing import PackedTokens

FUNCTIONS = "transformers.models.qwen3_5.modeling_qwen3_5"
"""The module with the functions of the convolution and the recurrence, which takes seconds to import."""


@dataclass
class GatedDeltaSubmodules:
    """The kinds of the two linear layers."""

    in_proj: Any
    out_proj: Any


def gated_delta(recurrence: Recurrence, in_proj: Any, out_proj: Any) -> ModuleSpec:
    """Specification of a layer. `in_proj` and `out_proj` split their outputs and inputs over the ranks."""
    parts = GatedDeltaSubmodules(in_proj, out_proj)
    return ModuleSpec(module=GatedDelta, params={"recurrence": recurrence}, submodules=parts)


class GatedDelta(torch.nn.Module):
    """The layer, in the place of attention. Each rank has an equal part of the key heads and of their value heads."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaSubmodules,
        layer_number: int,
        recurrence: Recurrence,
        pg_collection: Any,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.sizes, self.ranks, self.epsilon = recurrence, pg_collection.tp.size(), config.layernorm_epsilon
        r, empty = recurrence, functools.partial(torch.empty, dtype=config.params_dtype)
        common = {"config": config, "bias": False, "skip_bias_add": False, "is_expert": False}
        projected = r.channels + r.value_width + 2 * r.value_heads
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            projected,
            init_method=config.init_method,
            gather_output=False,
            tp_comm_buffer_name="fc1",
            tp_group=pg_collection.tp,
            **common,
        )
        self.conv1d = Weight(empty(r.channels // self.ranks, 1, r.window))
        self.dt_bias = torch.nn.Parameter(empty(r.value_heads // self.ranks))
        self.A_log = torch.nn.Parameter(empty(r.value_heads // self.ranks))
        self.out_norm = Weight(empty(r.value_dim))
        self.out_proj = build_module(
            submodules.out_proj,
            r.value_width,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            tp_comm_buffer_name="fc2",
            tp_group=pg_collection.tp,
            **common,
        )

    def forward(
        self, hidden: Tensor, attention_mask: None = None, *, packed_seq_params: PackedTokens, **unused: Any
    ) -> tuple[Tensor, None]:
        """[P, 1, H] → [P, 1, H], the tokens split over ranks if the sequence is."""
        r, ranks = self.sizes, self.ranks
        projected_pc = self.in_proj(hidden)[0][:, 0]
        heads = r.value_heads // ranks
        mixed_pc, gate_pc, rates_decays_pc = projected_pc.split(
            [r.channels // ranks, r.value_width // ranks, 2 * heads], 1
        )
        core_pc = torch.cat([mixed_pc, rates_decays_pc], 1)
        out_phd = packed_seq_params.segments.computed(self._core, core_pc)
        out_pc = self._normed(out_phd, gate_pc.unflatten(1, (heads, -1))).flatten(1)
        return self.out_proj(out_pc[:, None])[0], None

    def _core(self, core_ntc: Tensor) -> Tensor:
        """Convolution and recurrence of n sequences of t tokens. [n, t, channels + 2 · value heads], with rates and
        decays last → [n, t, value heads, d]."""
        r, functions = self.sizes, import_module(FUNCTIONS)
        heads, keys = len(self.A_log), r.key_width // self.ranks
        mixed_ntc, rate_nth, decay_nth = core_ntc.split([core_ntc.shape[2] - 2 * heads, heads, heads], 2)
        weight_cw = self.conv1d.weight[:, 0]
        mixed_ntc = functions.causal_conv1d_fn(mixed_ntc.transpose(1, 2), weight_cw, None, activation="silu").transpose(
            1, 2
        )
        widths = (keys, keys, mixed_ntc.shape[2] - 2 * keys)
        dims = (r.key_dim, r.key_dim, r.value_dim)
        query, key, value = (
            part.unflatten(2, (-1, dim)) for part, dim in zip(mixed_ntc.split(widths, 2), dims, strict=True)
        )
        repeats = r.value_heads // r.key_heads
        if repeats > 1:
            query, key = (part.repeat_interleave(repeats, dim=2) for part in (query, key))
        out_nthd, _ = functions.torch_chunk_gated_delta_rule(
            query,
            key,
            value,
            g=-self.A_log.float().exp() * F.softplus(decay_nth.float() + self.dt_bias),
            beta=rate_nth.sigmoid(),
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=True,
        )
        found: Tensor = out_nthd
        return found

    def _normed(self, out_phd: Tensor, gate_phd: Tensor) -> Tensor:
        """The norm of each head's output, times its gate. All ranks have the norm's weight and use it for other heads:
        its gradient is the sum of theirs."""
        weight_d = copy_to_tensor_model_parallel_region(self.out_norm.weight)
        normed_phd = F.rms_norm(out_phd.float(), out_phd.shape[2:], eps=self.epsilon).to(out_phd.dtype)
        found: Tensor = (weight_d * normed_phd * F.silu(gate_phd.float())).to(out_phd.dtype)
        return found


class Weight(torch.nn.Module):
    """A weight with a name of its own, as in the model folder."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

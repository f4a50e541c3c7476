"""The modules of which the transformer is built.

With CUDA they are those of Transformer Engine. Without it they are Megatron's linear layers with the norm and the
attention below, which, unlike Megatron's, support tokens that are split over ranks and packed sequences.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from millrace.megatron.architectures.shape import ModelShape
from millrace.megatron.weights import LOCAL, TRANSFORMER_ENGINE, Layers
from services.trainer.backends.megatron.model.recurrence import gated_delta
from services.trainer.backends.megatron.packing import PackedTokens, context_split

NORM_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Names of the norms in state dicts: those of Transformer Engine, so that both kinds of layers have the same names."""


def layers() -> Layers:
    """The kind of layers that is used here."""
    return TRANSFORMER_ENGINE if torch.cuda.is_available() else LOCAL


def block(config: TransformerConfig, shape: ModelShape, mine: range, chunk: int | None) -> TransformerBlockSubmodules:
    """Specification of the layers `mine` of the model, for the pipeline chunk `chunk`."""
    if layers() is TRANSFORMER_ENGINE:
        built = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=chunk)
        for spec in built.layer_specs:
            if spec.submodules.self_attention.module is MLASelfAttention:
                spec.submodules.self_attention.module = LatentAttention
        built.layer_specs = [_of_model(shape, layer, spec) for layer, spec in zip(mine, built.layer_specs, strict=True)]
        return built
    specs = [_of_model(shape, layer, _layer(shape, experts=shape.has_experts(layer))) for layer in mine]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm)


def _of_model(shape: ModelShape, layer: int, spec: ModuleSpec) -> ModuleSpec:
    """The layer's specification as the model has it: with a recurrence in the place of attention, or with features of
    images added to its output."""
    if layer < shape.deepstack_layers:
        spec = replace(spec, module=DeepstackLayer)
    if shape.recurrence is None or not shape.has_recurrence(layer):
        return spec
    linears: tuple[Any, Any] = (ColumnParallelLinear, RowParallelLinear)
    if layers() is TRANSFORMER_ENGINE:
        from megatron.core.extensions import transformer_engine as te

        linears = (te.TELayerNormColumnParallelLinear, te.TERowParallelLinear)
    mixer = gated_delta(shape.recurrence, *linears)
    return replace(spec, submodules=replace(spec.submodules, self_attention=mixer))


def _layer(shape: ModelShape, *, experts: bool) -> ModuleSpec:
    names = {} if shape.latent is not None else dict(NORM_NAMES)
    if experts:
        names.pop("pre_mlp_layernorm.", None)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=_latent_attention() if shape.latent is not None else _attention(shape),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm,
            mlp=_experts() if experts else ModuleSpec(module=MLP, submodules=_linears()),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=names,
        ),
    )


def _linears() -> MLPSubmodules:
    return MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def _experts() -> ModuleSpec:
    parts = MoESubmodules(
        experts=ModuleSpec(module=SequentialMLP, submodules=_linears()),
        shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=_linears()),
    )
    return ModuleSpec(module=MoELayer, submodules=parts, metainfo={"fuse_pre_mlp_layernorm": False})


def _attention(shape: ModelShape) -> ModuleSpec:
    norm = Norm if shape.query_key_norm else None
    parts = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=PackedAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    return ModuleSpec(module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=parts)


def _latent_attention() -> ModuleSpec:
    parts = MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_q_down_proj=WholeLinear,
        linear_q_up_proj=ColumnParallelLinear,
        linear_kv_down_proj=WholeLinear,
        linear_kv_up_proj=ColumnParallelLinear,
        core_attention=PackedAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=Norm,
        kv_layernorm=Norm,
    )
    return ModuleSpec(module=LatentAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=parts)


class DeepstackLayer(TransformerLayer):  # type: ignore[misc]  # megatron has no types
    """A layer that adds features of images to its output (DeepStack, arXiv 2406.04334)."""

    def forward(self, *inputs: Any, packed_seq_params: PackedTokens, **named: Any) -> tuple[Tensor, Any]:
        """The hidden states after the layer, [P, 1, H], and what the layer gives beside them. A layer that is computed
        again adds the features again, to the output that it computes again."""
        hidden_p1h, context = super().forward(*inputs, packed_seq_params=packed_seq_params, **named)
        if packed_seq_params.added is not None:
            places_n, features_lnh = packed_seq_params.added
            features_nh = features_lnh[self.layer_number - 1]
            hidden_p1h = hidden_p1h.index_add(0, places_n, features_nh[:, None].to(hidden_p1h.dtype))
        return hidden_p1h, context


class LatentAttention(MLASelfAttention):  # type: ignore[misc]  # megatron has no types
    """Megatron's latent attention with the parts of its specification. From 0.19 on Megatron would norm the input of a
    query projection without latents (Moonlight) too, which the models do not."""

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


class Norm(torch.nn.RMSNorm):
    """torch's RMSNorm. It is marked if each rank sees a part of the tokens: its gradient is summed over ranks
    then."""

    def __init__(self, *, config: TransformerConfig, hidden_size: int, eps: float, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.centred = config.layernorm_zero_centered_gamma
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, hidden: Tensor) -> Tensor:
        """The hidden states with the mean of their squares 1, times the weight, or 1 + the weight, in float32."""
        if not self.centred:
            return super().forward(hidden)
        normed = F.rms_norm(hidden.float(), self.normalized_shape, eps=self.eps)
        return (normed * (1 + self.weight.float())).to(hidden.dtype)


class WholeLinear(torch.nn.Module):
    """A linear layer that is not split: every tensor-parallel rank has all of it, and applies it to the tokens that it
    sees."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **unused: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return F.linear(hidden, self.weight), None


class PackedAttention(torch.nn.Module):
    """Causal attention within each sequence of a packed batch, by torch's kernels, one sequence after the other. With
    context parallelism each rank gathers the keys and values of all ranks."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: Any, **unused: Any
    ) -> Tensor:
        """Attention of query [P, heads, d], key [P, groups, d], value [P, groups, v] → [P, heads · v], of the tokens
        of this rank."""
        lengths: list[int] = packed_seq_params.cu_seqlens_q.diff().tolist()
        ranks = parallel_state.get_context_parallel_world_size()
        masks: Sequence[Tensor | None] = [None] * len(lengths) if ranks == 1 else _masks(lengths, ranks)
        if ranks > 1:
            key, value = (_of_all_ranks(tensor, lengths, ranks) for tensor in (key, value))
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:
            key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        outputs, mine = [], [length // ranks for length in lengths]
        for q, k, v, mask in zip(query.split(mine), key.split(lengths), value.split(lengths), masks, strict=True):
            q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
            found = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=self.scale)
            outputs.append(found[0].transpose(0, 1))
        return torch.cat(outputs).flatten(1)


def _masks(lengths: list[int], ranks: int) -> list[Tensor]:
    """For each sequence which of its tokens each token of this context-parallel rank attends to, bool [tokens of this
    rank, tokens]."""
    owner_p, _ = context_split(lengths, ranks)
    owned = [owner_t == parallel_state.get_context_parallel_rank() for owner_t in owner_p.split(lengths)]
    return [owned_t.nonzero() >= torch.arange(len(owned_t)) for owned_t in owned]


def _of_all_ranks(tensor: Tensor, lengths: list[int], ranks: int) -> Tensor:
    """The tokens of all context-parallel ranks, in the order of their sequences. Each rank gets the sum of all ranks'
    gradients of its tokens."""
    owner_p, local_p = context_split(lengths, ranks)
    gathered = gather_from_sequence_parallel_region(tensor, group=parallel_state.get_context_parallel_group())
    whole: Tensor = gathered[owner_p * len(tensor) + local_p]
    return whole

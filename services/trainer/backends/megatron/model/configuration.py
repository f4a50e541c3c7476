"""The configuration of megatron-core from the model's shape and the job's options."""

from typing import Any

import structlog
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from millrace.backends.megatron import MegatronOptions, Recompute, deepep_obstacle
from millrace.descriptors import Hosts
from millrace.errors import refused
from millrace.megatron.architectures.shape import ExpertShape, LatentAttention, ModelShape


def configuration(
    shape: ModelShape,
    options: MegatronOptions,
    dtype: torch.dtype,
    *,
    dispatcher: str = "alltoall",
    images: bool = False,
) -> TransformerConfig:
    """The configuration. `dispatcher`: alltoall, or deepep if that works, see `experts.dispatch`. `images`: tokens have
    positions by time, height and width."""
    cuda = torch.cuda.is_available()
    fields: dict[str, Any] = {
        **_sizes(shape),
        **_parallelism(options, dtype),
        **_recompute(options.recompute),
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "attention_backend": AttnBackend.auto,
        # The weights are read from the model folder.
        "perform_initialization": False,
        "use_cpu_initialization": not cuda,
        "bias_activation_fusion": cuda,
        "bias_dropout_fusion": cuda,
        "apply_rope_fusion": cuda and shape.latent is None,
        "mrope_section": list(shape.rope.sections) if images else None,
    }
    if shape.experts is not None:
        fields |= _experts(shape.experts, options, dispatcher, cuda)
    if shape.latent is None:
        return TransformerConfig(**fields)
    return MLATransformerConfig(**fields, **_latent(shape, shape.latent))


def _sizes(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.key_value_heads,
        "kv_channels": shape.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_epsilon,
        "layernorm_zero_centered_gamma": shape.centred_norms,
        "attention_output_gate": shape.gated,
        "qk_layernorm": shape.query_key_norm or shape.latent is not None,
        "add_bias_linear": False,
        "add_qkv_bias": shape.attention_bias,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        # A policy is trained with the probabilities with which it sampled.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _parallelism(options: MegatronOptions, dtype: torch.dtype) -> dict[str, Any]:
    chunks = options.virtual_pipeline
    return {
        "tensor_model_parallel_size": options.tensor_parallel,
        "sequence_parallel": options.splits_sequence,
        "pipeline_model_parallel_size": options.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "num_layers_in_first_pipeline_stage": options.first_stage_layers,
        "num_layers_in_last_pipeline_stage": options.last_stage_layers,
        "context_parallel_size": options.context_parallel,
        "expert_model_parallel_size": options.expert_parallel,
        "expert_tensor_parallel_size": options.expert_tensor_size,
        "pipeline_dtype": dtype,
        # Packed micro-batches differ in length.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "batch_p2p_comm": False,
        "overlap_p2p_comm": chunks > 1,
        # Gloo may still be sending from that memory; on GPUs it is freed in the order of the stream.
        "deallocate_pipeline_outputs": options.pipeline_parallel > 1 and torch.cuda.is_available(),
    }


def _recompute(recompute: Recompute) -> dict[str, Any]:
    if recompute.granularity == "none":
        return {}
    if recompute.granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}
    return {
        "recompute_granularity": "full",
        "recompute_method": recompute.method,
        "recompute_num_layers": recompute.layers,
    }


def _experts(experts: ExpertShape, options: MegatronOptions, dispatcher: str, cuda: bool) -> dict[str, Any]:
    asked = options.experts
    flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_layer_freq": [int(has) for has in experts.layers],
        "moe_shared_expert_intermediate_size": experts.shared_ffn,
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_router_topk": experts.per_token,
        "moe_router_score_function": experts.score,
        # Softmax over the chosen experts equals softmax over all experts, restricted to the chosen and normalised.
        "moe_router_pre_softmax": experts.score == "sigmoid" or not experts.normalised,
        "moe_router_topk_scaling_factor": experts.scaling,
        "moe_router_num_groups": experts.groups,
        "moe_router_group_topk": experts.groups_per_token,
        "moe_router_enable_expert_bias": experts.bias,
        "moe_router_bias_update_rate": asked.bias_update_rate,
        # The engine routes in float32 too; a token that goes to other experts here would be a mismatch.
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": asked.load_balancing,
        "moe_aux_loss_coeff": asked.aux_loss_coefficient,
        "moe_grouped_gemm": cuda,
        "moe_permute_fusion": cuda,
        **(flex if dispatcher == "deepep" else {}),
    }


def _latent(shape: ModelShape, latent: LatentAttention) -> dict[str, Any]:
    rope = shape.rope
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_value_rank,
        "qk_head_dim": latent.plain_dim,
        "qk_pos_emb_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        "rotary_base": rope.theta,
        "rope_type": "yarn" if rope.kind == "yarn" else "rope",
        # Without yarn the factor is 1, which leaves the attention's scale as it is.
        "rotary_scaling_factor": rope.factor,
        "original_max_position_embeddings": rope.original_context,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }


log = structlog.get_logger(__name__)


def dispatcher(options: MegatronOptions, hosts: Hosts) -> str:
    """`deepep` or `alltoall`, for ranks that lie on `hosts`. Across hosts DeepEP was never run, so `auto` does not take
    it there. Raises InvalidJob if DeepEP is asked for and not available."""
    asked, across = options.experts.dispatcher, hosts.cross(options.expert_parallel, options.expert_tensor_size)
    if asked == "alltoall" or options.expert_parallel == 1:
        return "alltoall"
    obstacle = "expert_parallel crosses hosts" if asked == "auto" and across else deepep_obstacle()
    if obstacle is None:
        return "deepep"
    if options.experts.dispatcher == "deepep":
        raise refused("trainer.backend_options.experts.dispatcher", "deepep", obstacle, "set it to auto.")
    if torch.cuda.is_available():
        log.warning("experts are dispatched by all-to-all", reason=obstacle)
    return "alltoall"

"""From a job spec to vLLM's engine arguments, and from a request to its parameters. Options with which samples or
weights would be wrong are refused."""

import dataclasses
import secrets
from collections.abc import Collection, Sequence
from typing import Any, get_args

from millrace.data.pictures import WHOLE
from millrace.data.quantization import engine_overrides
from millrace.engines import ENGINES
from millrace.engines.vllm import fix_for_unequal, unequal
from millrace.errors import InvalidState, refused
from millrace.spec import JobSpec
from services.rollout.engine import Sampling, StopReason
from services.rollout.engines.adapter import AdapterShape, not_served
from services.rollout.engines.options import (
    check_names,
    has_latents,
    read_config,
    read_text_config,
    refuse_recurrent,
)
from services.rollout.engines.vllm.cpu_weights import experts_kernel
from services.rollout.nodes.place import EngineStart

CPU_KV_CACHE_BYTES = 1 << 30
TEXT_PARTS = {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM"}
"""Model types with a tower for images whose language model alone is trained and published, and the class of that in
vLLM. It takes the names of tensors that the trainer publishes."""
SHOWN_RECURRENT = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", *TEXT_PARTS)
"""Model types with linear attention whose tokens in the CPU build were compared with transformers, before, during and
after publications."""
SHOWN_ON_GPUS = ("qwen3_5",)
"""Model types whose log-probabilities on a GPU were compared with the trainer's: BENCHMARKS.md has the figures."""
EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
"""Entries of a config that say how many experts a layer has, as vLLM reads them."""
ON_LATENTS: dict[str, Any] = {
    # The CPU build's other backend for it packs weights, and supports bfloat16 only.
    "attention_config": {"backend": "CPU_MLA"},
    # The CPU build's kernel for plain RoPE is wrong for queries of shape [tokens, heads, dimensions], as these are.
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
}
"""Arguments that vLLM's CPU build needs for attention on latents."""
FUSION_NEEDS_MULTICAST = ("0.25.", "0.26.")
"""Releases that fuse all-reduce and norm by NVLink multicast also if the GPUs have none."""


def engine_arguments(spec: JobSpec, adapter: AdapterShape | None = None, start: EngineStart | None = None) -> Any:
    """AsyncEngineArgs for a job and the adapter that every request uses. `start`: this node's start, for an engine on
    several hosts. Raises InvalidJob for an option that vLLM does not take."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        refuse_recurrent(spec.model.path, "vLLM's CPU build", SHOWN_RECURRENT)
    else:
        refuse_recurrent(spec.model.path, "vLLM on GPUs", SHOWN_ON_GPUS)
    _refuse_unequal(spec, on_cpu=current_platform.is_cpu())
    if current_platform.is_cpu():
        _refuse_head_size(spec.model.path)
    options = spec.rollout.options_of("vllm")
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    check_names(spec, "vllm", known, "AsyncEngineArgs")
    arguments: dict[str, Any] = {
        "max_model_len": spec.data.max_prompt_tokens + spec.rollout.max_response_tokens,
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        # Replicas must not draw the same random numbers.
        "seed": secrets.randbits(31),
    }
    if current_platform.is_cpu():
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES, "max_num_seqs": 64}
        if has_latents(spec.model.path):
            arguments |= ON_LATENTS
    arguments |= _image_arguments(spec, known)
    if spec.algorithm.router_replay:
        if current_platform.is_cpu():
            reason = "vLLM's CPU build does not report the experts of a token"
            raise refused("algorithm.router_replay", True, reason, "use the transformers engine, or leave it out.")
        arguments["enable_return_routed_experts"] = True
    arguments |= _rank_arguments(spec, adapter, start)
    arguments |= options
    text_part = _text_part(spec.model.path) if spec.data.images is None else {}
    if overrides := engine_overrides(spec.model.path) | text_part:
        arguments["hf_overrides"] = {**arguments.get("hf_overrides", {}), **overrides}
    if adapter is not None:
        arguments |= _adapter_arguments(spec, adapter)
    arguments |= {
        "model": spec.model.path,
        "trust_remote_code": spec.model.trust_remote_code,
        "dtype": spec.rollout.dtype,
        # A publication comes before the first request, so reading the checkpoint would be wasted time.
        "load_format": "dummy",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "services.rollout.engines.vllm.worker.WorkerExtension",
        "generation_config": "vllm",
        "enable_log_requests": False,
    }
    if start is not None:
        arguments |= _node_arguments(spec, start)
    return without_broken_fusion(AsyncEngineArgs(**arguments))


def _image_arguments(spec: JobSpec, known: Collection[str]) -> dict[str, Any]:
    """What a job with images asks of vLLM, or a job of text of a model that has a tower. `known`: vLLM's options."""
    if spec.data.images is None:
        leave_out = _has_tower(spec.model.path) and "hf_overrides" not in spec.rollout.options_of("vllm")
        return {"limit_mm_per_prompt": {"image": 0, "video": 0}} if leave_out else {}
    return {
        "limit_mm_per_prompt": {"image": spec.data.images.max_per_prompt, "video": 0},
        # Both ends of this cache have to see the same requests in the same order, which publications would upset.
        "mm_processor_cache_gb": 0,
        # Otherwise vLLM normalises pixels by figures of its own where the folder's file has none.
        **{name: False for name in ("mm_device_do_normalize",) if name in known},
    }


def _refuse_unequal(spec: JobSpec, *, on_cpu: bool) -> None:
    """Raises InvalidJob for a model that vLLM computes otherwise than the trainer does."""
    longest, images = spec.data.max_prompt_tokens + spec.rollout.max_response_tokens, spec.data.images is not None
    if reason := unequal(read_text_config(spec.model.path), longest, on_cpu=on_cpu, images=images):
        raise refused("model.path", spec.model.path, reason, fix_for_unequal(images))


def _refuse_head_size(model: str) -> None:
    """Raises InvalidJob if vLLM's CPU build has no attention kernel for the model's heads: its engine would die at the
    first request."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    text = read_text_config(model)
    heads = text.get("num_attention_heads")
    if not heads or has_latents(model):
        return
    size = text.get("head_dim") or text.get("hidden_size", 0) // heads
    if size and size not in (known := CPUAttentionBackend.get_supported_head_sizes()):
        reason = (
            f"its heads have {size} values, and vLLM's CPU build computes attention with {', '.join(map(str, known))}"
        )
        raise refused("model.path", model, reason, "start replicas with the transformers engine, or change head_dim.")


def _text_part(model: str) -> dict[str, Any]:
    """The entry of a model's config that has vLLM build its language model alone; none for a model of text, and for
    releases of vLLM that do not have the language model: they build the whole, and leave out the tower."""
    from vllm import ModelRegistry

    name = TEXT_PARTS.get(read_config(model).get("model_type", ""))
    return {"architectures": [name]} if name in ModelRegistry.get_supported_archs() else {}


def _has_tower(model: str) -> bool:
    """Whether vLLM builds a model with a tower for images."""
    kind = read_config(model).get("model_type")
    return kind in WHOLE or (kind in TEXT_PARTS and not _text_part(model))


def without_broken_fusion(arguments: Any) -> Any:
    """`arguments`, AsyncEngineArgs, with the fusion of `FUSION_NEEDS_MULTICAST` off unless they say otherwise. On, its
    kernel reads a null address, and an engine over several GPUs ends as it starts (vLLM's pull request 49043)."""
    import vllm
    from vllm.platforms import current_platform

    passes = arguments.compilation_config.pass_config
    broken = vllm.__version__.startswith(FUSION_NEEDS_MULTICAST) and not current_platform.is_cpu()
    if broken and arguments.tensor_parallel_size > 1 and passes.fuse_allreduce_rms is None:
        passes.fuse_allreduce_rms = False
    return arguments


def _rank_arguments(spec: JobSpec, adapter: AdapterShape | None, start: EngineStart | None) -> dict[str, Any]:
    """Arguments for several data-parallel ranks, with the experts over the workers of all of them. Raises InvalidJob
    for a model with fewer experts than workers, and for what was not compared with the trainer on several ranks."""
    options, field = spec.rollout.options_of("vllm"), spec.rollout.field_of("vllm", "data_parallel_size")
    ranks, workers = int(options.get("data_parallel_size") or 1), ENGINES["vllm"].world_size(options)
    if ranks == 1:
        return {}
    reasons = {
        "a replica over several hosts": start is not None,
        "adapters that are published alone (model.lora.merge: false)": adapter is not None,
        "images (data.images)": spec.data.images is not None,
        "replayed routers (algorithm.router_replay)": spec.algorithm.router_replay,
        "pipeline stages (pipeline_parallel_size)": int(options.get("pipeline_parallel_size") or 1) > 1,
        "experts that lie over each rank's workers alone (enable_expert_parallel: false)": not options.get(
            "enable_expert_parallel", True
        ),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        reason = f"several data-parallel ranks were not compared with the trainer together with: {'; '.join(found)}"
        raise refused(field, ranks, reason, "leave one of them out, or start more replicas instead.")
    config = read_text_config(spec.model.path)
    experts = next((int(config[name]) for name in EXPERTS if config.get(name)), 0)
    if experts < workers:
        reason = f"the model has {experts or 'no'} experts, to lie over {workers} workers"
        raise refused(field, ranks, reason, "leave it out, or lower it, and start more replicas.")
    return {"enable_expert_parallel": True}


def _node_arguments(spec: JobSpec, start: EngineStart) -> dict[str, Any]:
    """Arguments for one node's share of the engine. Raises InvalidJob if the workers do not divide into nodes."""
    options = spec.rollout.options_of("vllm")
    ranks, backend = ENGINES["vllm"].world_size(options), options.get("distributed_executor_backend", "mp")
    if ranks % start.nodes:
        field = spec.rollout.field_of("vllm", "tensor_parallel_size")
        reason = f"{ranks} workers do not divide evenly into the {start.nodes} nodes of this replica"
        fix = f"choose tensor_parallel_size · pipeline_parallel_size as a multiple of {start.nodes}."
        raise refused(field, options.get("tensor_parallel_size", 1), reason, fix)
    if backend != "mp":
        field = spec.rollout.field_of("vllm", "distributed_executor_backend")
        reason = "over several hosts the replica uses vLLM's multiprocessing executor"
        raise refused(field, backend, reason, 'remove it, or set it to "mp".')
    return {
        "distributed_executor_backend": "mp",
        "nnodes": start.nodes,
        "node_rank": start.rank,
        "master_addr": start.host,
        "master_port": start.port,
        "seed": options.get("seed", start.seed),
    }


def _adapter_arguments(spec: JobSpec, adapter: AdapterShape) -> dict[str, Any]:
    """Arguments for one slot of the adapter's rank, or of the next larger one that vLLM has kernels for. Raises
    InvalidJob for an adapter that vLLM cannot serve."""
    from vllm.config.lora import MaxLoRARanks

    if has_latents(spec.model.path):
        raise not_served("vLLM computes with kv_b_proj folded into other weights, without its adapter")
    ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= adapter.rank]
    if not ranks:
        raise not_served(f"vLLM serves ranks up to {max(get_args(MaxLoRARanks))}, and the adapter has {adapter.rank}")
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(ranks),
        # Layers with an adapter compute more, even if it is zero.
        "lora_target_modules": adapter.kinds,
    }


def check_model(config: Any) -> None:
    """Raises InvalidJob for a model whose parameters vLLM transforms after loading: a published version would overwrite
    the transformed ones; and, if the job has an adapter, for a model without adapters. `config` is vLLM's
    VllmConfig."""
    from vllm.platforms import current_platform

    model, cpu = config.model_config, current_platform.is_cpu()
    backend = getattr(config.attention_config.backend, "name", "")
    reasons = {
        "quantized weights": config.quant_config is not None,
        f"attention on latents by {backend or 'AMX_MLA'}": cpu and model.use_mla and backend != "CPU_MLA",
        "experts on this CPU build": cpu and _experts(model) > 0 and experts_kernel() is None,
    }
    if broken := [reason for reason, holds in reasons.items() if holds]:
        reason = f"the model has {', '.join(broken)}, which vLLM repacks as it loads"
        fix = "leave that option out, take a newer vLLM, or use a model without them."
        raise refused("model.path", model.model, reason, fix)
    if config.lora_config is not None:
        _check_lora(model, cpu=cpu)


def _check_lora(model: Any, *, cpu: bool) -> None:
    """Raises InvalidJob if vLLM has no adapters for the model. `model` is vLLM's ModelConfig."""
    import torch
    from vllm.model_executor.model_loader.utils import get_model_architecture
    from vllm.model_executor.models import supports_lora

    implementation, _ = get_model_architecture(model)
    if not supports_lora(implementation):
        raise not_served(f"vLLM's {implementation.__name__} serves no adapters")
    if model.dtype == torch.float32 and not cpu:
        raise not_served("on a GPU vLLM computes adapters in bfloat16 and float16 alone, and rollout.dtype is float32")


def _experts(model: Any) -> int:
    count = getattr(model, "get_num_experts", None)
    return int(count()) if count is not None else 0


def check_api(llm: type, client: type) -> None:
    """Raises InvalidState naming what AsyncLLM and its AsyncMPClient lack in this release."""
    needed = {
        "AsyncLLM": (llm, ("resume_generation", "collective_rpc", "generate", "abort", "from_vllm_config")),
        "AsyncMPClient": (client, ("pause_scheduler_async", "get_output_async", "_call_utility_async")),
    }
    missing = [f"{of}.{name}" for of, (found, names) in needed.items() for name in names if not hasattr(found, name)]
    if missing:
        software = ENGINES["vllm"].software
        what = f"vLLM {software.release} has no {', '.join(missing)}."
        raise InvalidState(what, f"install vLLM {software.oldest_tested} or newer.")


def parameters(sampling: Sampling, end_of_turn: Sequence[int], *, carried: int = 0) -> Any:
    """SamplingParams for a sample that any of the tokens `end_of_turn` ends. `carried`: tokens that it has already. A
    stop string may begin in them, and vLLM would not see it: its output comes token by token then, without text."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_response_tokens - carried,
        stop=[] if carried else list(sampling.stop),
        stop_token_ids=list(end_of_turn),
        logprobs=0,
        flat_logprobs=True,
        # Only stop strings need the text token by token.
        detokenize=bool(sampling.stop) and not carried,
        output_kind=RequestOutputKind.CUMULATIVE if carried and sampling.stop else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def is_whole(final: Any) -> bool:
    """Whether the last output of a request is that of a sample that came to its end."""
    return final is not None and final.outputs[0].finish_reason in ("stop", "length")


def stop_reason(output: Any) -> StopReason:
    """What ended a sample."""
    if isinstance(output.stop_reason, str):
        return StopReason.STOP_STRING
    return StopReason.LENGTH if output.finish_reason == "length" else StopReason.END_OF_TURN

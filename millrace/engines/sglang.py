"""SGLang. Its options are `ServerArgs`; the engine is in `services/rollout/engines/sglang`.

What it computes otherwise than transformers was read in the model files of the release in `tested`."""

import math
from collections.abc import Mapping
from typing import Any

from millrace.descriptors import EXPERTS_MOVE, NO_DRAFT_WEIGHTS, SAMPLING_FIELDS, EngineDescriptor
from millrace.differences import rotary, unequal_in_engines
from millrace.software import TESTED_TORCH, Software
from millrace.validation.names import by_name

ASSUMED: Mapping[str, Mapping[str, Any]] = {
    "cohere": {"hidden_act": "silu"},
    "cohere2": {"hidden_act": "silu"},
    "cohere2_moe": {"hidden_act": "silu"},
    "exaone4": {"rope_theta": 1_000_000},
    "gemma": {"hidden_act": "gelu"},
    "gpt2": {"activation_function": "gelu_new", "scale_attn_weights": True},
    "gpt_bigcode": {"scale_attn_weights": True},
    "granitemoe": {"hidden_act": "silu"},
    "minimax_m2": {"hidden_act": "silu"},
    "mixtral": {"hidden_act": "silu"},
    "olmo": {"hidden_act": "silu"},
    "olmo2": {"hidden_act": "silu"},
    "olmoe": {"norm_topk_prob": False, "clip_qkv": None, "rms_norm_eps": 1e-5, "hidden_act": "silu"},
    "stablelm": {"hidden_act": "silu", "use_parallel_residual": False},
}
"""For each model type the entries of a config that SGLang does not read and transformers follows, with the value that
SGLang computes with."""
MISSING: Mapping[str, Mapping[str, Any]] = {
    "exaone4": {"rope_theta": 10_000.0},
    "gemma": {"hidden_act": "gelu_pytorch_tanh"},
}
"""What transformers takes for missing entries of `ASSUMED`, where that is not what SGLang computes with."""
IGNORED: Mapping[str, Mapping[str, Any]] = {"deepseek_v2": {"norm_topk_prob": False}}
"""For each model type the entries that SGLang follows and transformers does not read, with the value that transformers
computes with."""
UNSCALED = frozenset(["gemma", "gemma2", "granitemoe", "mixtral", "olmo", "persimmon", "phi", "stablelm", "starcoder2"])
"""Model types whose rotary positions SGLang does not scale, whatever the config says."""
PARTIAL: Mapping[str, float] = {
    **dict.fromkeys(("afmoe", "apertus", "arcee", "llama", "mistral", "phi3"), 1.0),
    **{"persimmon": 0.5, "phi": 0.5, "stablelm": 0.25},
}
"""Model types of which SGLang does not look for `partial_rotary_factor` among the settings of rotary positions, where
transformers takes it first; and what it computes with if the config has it nowhere else."""
FULL_ATTENTION = frozenset(["ministral3", "mistral", "mixtral", "phi3", "starcoder2"])
"""Model types that have windows in transformers and none in SGLang."""
FULL_IF_USED = frozenset(["qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen3", "qwen3_moe"])
"""The same, of which a config has to say `use_sliding_window`."""
WINDOWS: Mapping[str, int] = {"mistral": 4096, **dict.fromkeys(FULL_IF_USED, 4096)}
"""What transformers takes for a missing `sliding_window`."""
SHIFTED_WINDOWS = frozenset(["cohere2", "cohere2_moe", "cwm", "exaone_moe", "ministral", "olmo3", "vaultgemma"])
"""Model types in whose windows SGLang has one token more than transformers."""


def unequal(config: Mapping[str, Any], longest: int) -> str:
    """Why SGLang computes the model otherwise than the trainer does, in texts of up to `longest` tokens; empty if that
    is not known of it. `config`: the entries of the text part of its config.json."""
    kind, (rope, type_) = str(config.get("model_type")), rotary(config)
    stated = {**config, "rope_theta": rope["rope_theta"]} if "rope_theta" in rope else config
    if reason := unequal_in_engines("SGLang", stated, ASSUMED, IGNORED, MISSING):
        return reason
    beside, inside = config.get("partial_rotary_factor", PARTIAL.get(kind)), rope.get("partial_rotary_factor")
    if kind in PARTIAL and inside not in (None, beside):
        return f"SGLang turns a part of {beside} of each head, and transformers the partial_rotary_factor of {inside}"
    return _other_rope(kind, type_, rope) or _other_windows(kind, config, longest)


def _other_rope(kind: str, type_: str, rope: Mapping[str, Any]) -> str:
    """Why rotary positions are other than in transformers; empty if they are not."""
    factor = rope.get("attention_factor")
    if kind in UNSCALED and type_ != "default":
        return f"SGLang does not scale the rotary positions of {kind}, and its config has those of the type {type_}"
    if type_ == "yarn" and factor is not None and not math.isclose(factor, _yarn_factor(rope), rel_tol=1e-6):
        return (
            f"SGLang does not follow attention_factor = {factor!r} of rotary positions: it has {_yarn_factor(rope):g}"
        )
    return ""


def _yarn_factor(rope: Mapping[str, Any]) -> float:
    """The factor of sines and cosines if the config has none."""
    scale, one, other = rope.get("factor") or 1.0, rope.get("mscale"), rope.get("mscale_all_dim")
    grown = 0.1 * math.log(scale) if scale > 1 else 0.0
    return (1 + one * grown) / (1 + other * grown) if one and other else 1 + grown


def _other_windows(kind: str, config: Mapping[str, Any], longest: int) -> str:
    """Why texts of up to `longest` tokens are too long to be computed as in transformers; empty if they are not."""
    window, layers = config.get("sliding_window", WINDOWS.get(kind)), config.get("layer_types")
    if not isinstance(window, int) or longest <= window:
        return ""
    if layers and "sliding_attention" not in layers:
        return ""
    if kind in FULL_ATTENTION or (kind in FULL_IF_USED and _uses_windows(kind, config)):
        return f"SGLang computes it with full attention, and transformers with its sliding_window of {window} tokens"
    if kind in SHIFTED_WINDOWS:
        return f"SGLang's windows of {kind} have one token more than transformers', {window + 1}"
    return ""


def _uses_windows(kind: str, config: Mapping[str, Any]) -> bool:
    """Whether a layer of transformers' has a window, of a model type of `FULL_IF_USED`."""
    if not config.get("use_sliding_window"):
        return False
    if config.get("layer_types") or kind in ("qwen2_moe", "qwen3_moe"):
        return True
    return int(config.get("max_window_layers", 28)) < int(config.get("num_hidden_layers", 32))


DESCRIPTOR = EngineDescriptor(
    software=Software(
        title="SGLang",
        distributions=("sglang",),
        imports=("sglang",),
        extras=("gpu-sglang",),
        also_shown=("torch",),
        tested={"sglang": ("0.5.16",), "torch": TESTED_TORCH},
    ),
    implementation="services.rollout.engines.sglang.engine:SglangEngine",
    follower="services.rollout.engines.sglang.follower:SglangFollower",
    options_class="sglang.srt.server_args:ServerArgs",
    options_example={"max_running_requests": 256},
    option_bounds={
        "max_running_requests": (1, 1_000_000),
        "max_total_tokens": (1, 1_000_000_000),
        "max_prefill_tokens": (1, 1_000_000_000),
        "context_length": (1, 100_000_000),
        "tp_size": (1, 1024),
        "ep_size": (1, 1024),
        "page_size": (1, 65_536),
        "mem_fraction_static": (0.01, 1.0),
    },
    reserved_options=by_name(
        {
            "model.path": "model_path tokenizer_path",
            "model.trust_remote_code": "trust_remote_code",
            "rollout.dtype": "dtype",
            SAMPLING_FIELDS: "preferred_sampling_params sampling_defaults",
            "model.lora": "enable_lora",
            "model.lora.rank": "max_lora_rank",
            "model.lora.target_modules": "lora_target_modules",
            "": "load_format sampling_backend random_seed skip_tokenizer_init incremental_streaming_output "
            "quantization kv_cache_dtype pp_size dp_size nnodes node_rank dist_init_addr disaggregation_mode "
            "lora_paths max_loras_per_batch max_loaded_loras enable_lora_overlap_loading experts_shared_outer_loras",
        }
    ),
    unbuilt_options=by_name(
        {
            NO_DRAFT_WEIGHTS: "speculative_algorithm speculative_draft_model_path",
            EXPERTS_MOVE: "enable_eplb ep_num_redundant_experts init_expert_location ep_dispatch_algorithm "
            "elastic_ep_backend enable_elastic_expert_backup",
        }
    ),
    unreserved_options=frozenset({"enable_return_routed_experts"}),
    size_options=("tp_size",),
    memory_option="mem_fraction_static",
    memory_share=0.88,
    position_options=frozenset({"json_model_override_args"}),
)

"""SGLang. Its options are `ServerArgs`; the engine is in `services/rollout/engines/sglang`."""

from millrace.descriptors import EngineDescriptor
from millrace.engines.vllm import EXPERTS_MOVE, NO_DRAFT_WEIGHTS, SAMPLING_FIELDS
from millrace.software import TESTED_TORCH, Software
from millrace.validation.names import by_name

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

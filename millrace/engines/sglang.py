"""SGLang. Its options are `ServerArgs`; the engine is in `services/rollout/engines/sglang`."""

from millrace.descriptors import EngineDescriptor
from millrace.software import TESTED_TORCH, Software

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
    reserved_options={
        "model_path": "model.path",
        "tokenizer_path": "model.path",
        "trust_remote_code": "model.trust_remote_code",
        "dtype": "rollout.dtype",
        "load_format": "",
        "sampling_backend": "",
        "random_seed": "",
        "skip_tokenizer_init": "",
        "quantization": "",
        "kv_cache_dtype": "",
        "pp_size": "",
        "dp_size": "",
        "nnodes": "",
        "speculative_algorithm": "",
        "disaggregation_mode": "",
    },
    unreserved_options=frozenset({"enable_return_routed_experts"}),
    size_options=("tp_size",),
    memory_option="mem_fraction_static",
    memory_share=0.88,
    position_options=frozenset({"json_model_override_args"}),
)

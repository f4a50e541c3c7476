"""The cases that are measured, in launches, in parts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.megatron import models

Case = dict[str, Any]
"""What the ranks read from cases.json: `kind` names the function that measures, the rest are its parameters."""


@dataclass(frozen=True)
class Training:
    """Two updates of a small model with Megatron, to be compared with others."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    """The job's `trainer.backend_options`."""
    replayed: bool = False
    """Whether the experts of each token are given, so that rounding sends no token to another expert."""

    @property
    def group(self) -> str:
        """Trainings of the same group have the same model and batch, and are compared with each other."""
        return "replayed" if self.replayed else self.model


@dataclass(frozen=True)
class Launch:
    """Cases that a group of ranks runs one after the other."""

    name: str
    gpus: tuple[int, ...]
    limit_s: float
    cases: list[Case] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    compared: bool = False
    """Whether the results of its cases are compared with those of other cases."""


@dataclass(frozen=True)
class Machine:
    """The machine on which the program runs, and how thoroughly it measures."""

    scratch: Path
    cuda: bool
    quick: bool
    gpus: int
    """Number of GPUs; without CUDA, the number of simulated ones."""

    def other_gpus(self, count: int) -> tuple[int, ...]:
        """`count` GPUs after the first `count`, or the first ones where there are no others."""
        first = count if self.gpus >= 2 * count else 0
        return tuple(range(first, first + count))

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.cuda else "float32"


ON_ONE_GPU: dict[str, Training] = {
    "dense": Training("dense", {"fused_gradients": False}),
    "dense, fused gradients": Training("dense", {}),
    "dense, again": Training("dense", {"fused_gradients": False}),
    "dense, recompute core_attn": Training("dense", {"recompute": {"granularity": "selective"}}),
    "dense, recompute full": Training("dense", {"recompute": {"granularity": "full"}}),
    "dense, optimizer offloaded between": Training("dense", {"offload_optimizer": True, "release_gradients": True}),
    "dense, parameters offloaded between": Training("dense", {"offload_parameters": True}),
    "dense, moments in bfloat16": Training("dense", {"optimizer_moments": "bfloat16"}),
    "dense, offload 0.5": Training("dense", {"optimizer_offload_fraction": 0.5}),
    "dense, offload 0.5 and the rest between": Training(
        "dense", {"optimizer_offload_fraction": 0.5, "offload_optimizer": True}
    ),
    "dense, offload 1": Training("dense", {"optimizer_offload_fraction": 1.0}),
    "moe": Training("moe", {"fused_gradients": False}),
    "moe, again": Training("moe", {"fused_gradients": False}),
    "moe, fused gradients": Training("moe", {}),
    "replayed": Training("moe", {}, replayed=True),
    "replayed, recompute full": Training("moe", {"recompute": {"granularity": "full"}}, replayed=True),
    "moe, recompute moe_act": Training("moe", {"recompute": {"granularity": "selective", "modules": ["moe_act"]}}),
    "moe, recompute full": Training("moe", {"recompute": {"granularity": "full"}}),
    "moe, offload 1": Training("moe", {"optimizer_offload_fraction": 1.0}),
    "latent": Training("latent", {}),
}
"""Trainings on one GPU. `again` repeats a training: it shows by how much two runs of the same training differ."""
EXPERTS_WHOLE = {"expert_parallel": 2, "expert_tensor_parallel": 1}
ON_TWO_GPUS: dict[str, Training] = {
    "dense TP2": Training("dense", {"tensor_parallel": 2}),
    "dense PP2": Training("dense", {"pipeline_parallel": 2}),
    "dense CP2": Training("dense", {"context_parallel": 2}),
    "dense DP2": Training("dense", {}),
    "moe EP2": Training("moe", {"expert_parallel": 2}),
    "dense VPP2": Training("dense", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "dense TP2, tokens not split": Training("dense", {"tensor_parallel": 2, "sequence_parallel": False}),
    "moe TP2 EP2": Training("moe", {"tensor_parallel": 2, **EXPERTS_WHOLE}),
    "moe CP2 EP2": Training("moe", {"context_parallel": 2, "expert_parallel": 2}),
    "moe PP2": Training("moe", {"pipeline_parallel": 2}),
    "moe DP2": Training("moe", {}),
    "dense DP2, offload 1": Training("dense", {"optimizer_offload_fraction": 1.0}),
    "dense DP2, own optimizer state": Training("dense", {"distributed_optimizer": False}),
    "replayed EP2": Training("moe", {"expert_parallel": 2}, replayed=True),
    "replayed TP2 EP2": Training("moe", {"tensor_parallel": 2, **EXPERTS_WHOLE}, replayed=True),
    "replayed CP2 EP2": Training("moe", {"context_parallel": 2, "expert_parallel": 2}, replayed=True),
    "replayed PP2": Training("moe", {"pipeline_parallel": 2}, replayed=True),
    "replayed DP2": Training("moe", {}, replayed=True),
    "latent TP2 EP2": Training("latent", {"tensor_parallel": 2, **EXPERTS_WHOLE}),
}
"""Trainings on two GPUs."""
ON_FOUR_GPUS: dict[str, Training] = {
    "dense TP2 PP2": Training("dense", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "dense TP2 CP2": Training("dense", {"tensor_parallel": 2, "context_parallel": 2}),
    "replayed TP2 EP2 PP2": Training(
        "moe", {"tensor_parallel": 2, "pipeline_parallel": 2, **EXPERTS_WHOLE}, replayed=True
    ),
    "replayed EP2 DP2": Training("moe", {"expert_parallel": 2}, replayed=True),
    "dense PP2 VPP2 DP2": Training("dense", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "replayed EP4": Training("moe", {"expert_parallel": 4}, replayed=True),
    "replayed CP2 EP4": Training("moe", {"context_parallel": 2, "expert_parallel": 4}, replayed=True),
    "replayed TP2 EP4": Training("moe", {"tensor_parallel": 2, **EXPERTS_WHOLE, "expert_parallel": 4}, replayed=True),
    "latent TP2 EP2 PP2": Training("latent", {"tensor_parallel": 2, "pipeline_parallel": 2, **EXPERTS_WHOLE}),
    "latent TP2 EP2 DP2": Training("latent", {"tensor_parallel": 2, **EXPERTS_WHOLE}),
    "dense TP4": Training("dense", {"tensor_parallel": 4}),
    "dense CP4": Training("dense", {"context_parallel": 4}),
    "dense DP4": Training("dense", {}),
    "dense CP2 DP2": Training("dense", {"context_parallel": 2}),
    "dense PP4": Training("dense", {"pipeline_parallel": 4}),
    "moe TP2 EP2 PP2": Training("moe", {"tensor_parallel": 2, "pipeline_parallel": 2, **EXPERTS_WHOLE}),
}
"""Trainings on four GPUs. Ranks that the sizes do not use are data parallel."""
REFERENCES = ("dense", "moe", "replayed", "latent")
"""The trainings on one GPU with which those on several are compared."""

ONE_PRODUCT = {"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}
"""Makes Transformer Engine on Hopper compute the products of all experts in one launch, in the forward pass and for the
gradients of the inputs. The gradients of the weights, whose inner sizes differ, still take one launch per expert."""
OWN_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
"""CUDA's default: the products of the experts run in four streams, which a single queue would serialize."""


def equal(machine: Machine) -> list[Launch]:
    """The same batch trained by every topology of one and two GPUs, by Hugging Face and by FSDP2."""
    others = [
        *_by_hugging_face(machine),
        *(_compared(machine, f"{kind}, fsdp2", Training(kind), backend="fsdp2") for kind in ("dense", "moe")),
        {"name": "deepep", "kind": "deepep", "limit_s": 30.0},
    ]
    return [
        Launch("equal-1", (0,), 130.0, _all_of(machine, ON_ONE_GPU), compared=True),
        Launch("equal-others", (1,), 130.0, others, compared=True),
        Launch("equal-2", machine.other_gpus(2), 150.0, _all_of(machine, ON_TWO_GPUS), compared=True),
    ]


def equal_on_four(machine: Machine) -> list[Launch]:
    """The same batch trained by the topologies of four GPUs, by one GPU and by Hugging Face."""
    if machine.gpus < 4:
        return []
    references = _all_of(machine, {name: ON_ONE_GPU[name] for name in REFERENCES})
    return [
        Launch("equal-references", (0,), 80.0, references, compared=True),
        Launch("equal-hugging-face", (1,), 80.0, _by_hugging_face(machine), compared=True),
        Launch("equal-4", machine.other_gpus(4), 200.0, _all_of(machine, ON_FOUR_GPUS), compared=True),
    ]


def _compared(machine: Machine, name: str, training: Training, **more: Any) -> Case:
    laptop = not machine.cuda
    if not (model := machine.scratch / training.model).exists():
        models.small_model(training.model, model, laptop=laptop)
    return {
        "name": name,
        "kind": "compare",
        "model": str(model),
        "group": training.group,
        "file": str(machine.scratch / "trained" / training.group / f"{name}.safetensors"),
        "options": training.options,
        "replayed": training.replayed,
        "dtype": machine.dtype,
        "vocabulary": 1024 * (1 if laptop else 4),
        "longest": 64 if laptop else 1024,
        "limit_s": 60.0,
        **more,
    }


def _all_of(machine: Machine, table: Mapping[str, Training]) -> list[Case]:
    return _runnable(machine, [_compared(machine, name, training) for name, training in table.items()])


def _by_hugging_face(machine: Machine) -> list[Case]:
    trainings = [Training("dense"), Training("moe"), Training("latent"), Training("moe", replayed=True)]
    return [
        _compared(machine, f"{training.group}, huggingface float32", training, kind="huggingface")
        for training in trainings
    ]


def memory(machine: Machine) -> list[Launch]:
    """Each way to save memory, compared with none, on one GPU."""
    dense = [
        _speed(machine, "qwen3-8b", 12, "none", {}),
        _speed(machine, "qwen3-8b", 12, "recompute core_attn", {"recompute": {"granularity": "selective"}}),
        _speed(machine, "qwen3-8b", 12, "recompute mlp", _selective("mlp", "layernorm")),
        _speed(machine, "qwen3-8b", 12, "recompute full", {"recompute": {"granularity": "full"}}),
        _speed(machine, "qwen3-8b", 12, "gradients added apart", {"fused_gradients": False}),
        _speed(machine, "qwen3-8b", 4, "none", {}),
        _speed(machine, "qwen3-8b", 4, "offload between", {"offload_optimizer": True, "release_gradients": True}),
        _speed(machine, "qwen3-8b", 4, "moments in bfloat16", {"optimizer_moments": "bfloat16"}),
        _speed(machine, "qwen3-8b", 4, "offload 0.5", {"optimizer_offload_fraction": 0.5}),
        _speed(machine, "qwen3-8b", 4, "offload 1", {"optimizer_offload_fraction": 1.0}),
    ]
    full = {"recompute": {"granularity": "full"}}
    mixture = [
        _speed(machine, "qwen3-30b-a3b", 6, "none", {}),
        _speed(machine, "qwen3-30b-a3b", 6, "recompute moe_act", _selective("moe_act")),
        _speed(machine, "qwen3-30b-a3b", 6, "recompute full", full),
        _speed(machine, "qwen3-30b-a3b", 6, "gradients added apart", {"fused_gradients": False}),
        _speed(machine, "qwen3-30b-a3b", 6, "recompute full, 64k tokens", full, sequences=16),
    ]
    return [Launch("memory-dense", (0,), 130.0, dense), Launch("memory-moe", (1,), 130.0, mixture)]


def mfu(machine: Machine) -> list[Launch]:
    """Models with as many layers as two GPUs hold."""
    full = {"recompute": {"granularity": "full"}}
    cases = [
        _speed(machine, "qwen3-30b-a3b", 10, "EP2", {"expert_parallel": 2}),
        _speed(machine, "qwen3-30b-a3b", 10, "EP2, recompute full, 64k", {"expert_parallel": 2, **full}, sequences=16),
        _speed(machine, "qwen3-8b", 36, "TP2", {"tensor_parallel": 2}, sequences=2),
        _speed(machine, "qwen3-8b", 36, "DP2, recompute full", full),
        _speed(machine, "qwen3-8b", 16, "CP2", {"context_parallel": 2}, sequences=1, length=32768),
        _speed(machine, "qwen3-8b", 36, "PP2", {"pipeline_parallel": 2, **full}, microbatches=8, sequences=1),
    ]
    return [Launch("mfu-2", (0, 1), 170.0, cases)]


def mfu_moe(machine: Machine) -> list[Launch]:
    """A mixture of experts in micro-batches large enough that its kernels take longer than their launches: the host
    works as long for 64 thousand tokens as for 16, and less with more expert-parallel ranks. For GPUs of 139 GiB."""
    shape = "qwen3-30b-a3b"
    two, four = {"expert_parallel": 2}, {"expert_parallel": 4}
    moe_act, full = _selective("moe_act"), {"recompute": {"granularity": "full"}}
    halves = [
        _speed(machine, shape, 8, "EP2, 64k tokens, one product", two, sequences=16, environment=ONE_PRODUCT),
        _speed(machine, shape, 8, "EP2, 64k tokens", two, sequences=16),
        _speed(machine, shape, 10, "EP2, 32k tokens, one product", two, sequences=8, environment=ONE_PRODUCT),
        _speed(machine, shape, 10, "EP2, 32k tokens", two, sequences=8),
        _speed(machine, shape, 10, "EP2, 16k tokens", two),
        {**_speed(machine, shape, 10, "EP2, 32k tokens, profile", two, sequences=8), "kind": "profile"},
    ]
    if machine.gpus < 4:
        return [Launch("mfu-moe-2", (0, 1), 130.0, halves, OWN_QUEUES)]
    quarters = [
        _speed(machine, shape, 10, "EP4, 64k tokens, one product", four, sequences=16, environment=ONE_PRODUCT),
        _speed(machine, shape, 12, "EP4, 64k tokens, recompute moe_act", {**four, **moe_act}, sequences=16),
        _speed(machine, shape, 12, "EP4, 32k tokens, one product", four, sequences=8, environment=ONE_PRODUCT),
        _speed(machine, shape, 12, "EP4, 32k tokens", four, sequences=8),
        _speed(machine, shape, 8, "EP2 DP2, 64k tokens", two, sequences=16),
        _speed(machine, shape, 24, "EP4, 32k tokens, recompute full", {**four, **full}, sequences=8),
    ]
    return [
        Launch("mfu-moe-2", (0, 1), 100.0, halves[::2], OWN_QUEUES),
        Launch("mfu-moe-2-beside", (2, 3), 100.0, halves[1::2], OWN_QUEUES),
        Launch("mfu-moe-4", machine.other_gpus(4), 150.0, _runnable(machine, quarters), OWN_QUEUES),
    ]


def deepep(machine: Machine) -> list[Launch]:
    """Both dispatchers of tokens to experts, on two GPUs: the same training with the experts of each token given, and
    then their speed at 16, 32 and 64 thousand tokens a micro-batch."""
    given = Training("moe", {}, replayed=True)
    alone = [_compared(machine, "replayed, huggingface float32", given, kind="huggingface")]
    alone.append(_compared(machine, "replayed", given))
    both = {name: {"expert_parallel": 2, "experts": {"dispatcher": name}} for name in ("alltoall", "deepep")}
    trainings = {f"replayed EP2, {name}": Training("moe", options, replayed=True) for name, options in both.items()}
    speeds = [
        _speed(machine, "qwen3-30b-a3b", layers, f"EP2, {4 * sequences}k tokens, {name}", options, sequences=sequences)
        for sequences, layers in ((4, 10), (8, 10), (16, 8))
        for name, options in both.items()
    ]
    return [
        Launch("deepep-alone", (0,), 90.0, alone, compared=True),
        Launch("deepep-equal", (0, 1), 120.0, _all_of(machine, trainings), compared=True),
        Launch("deepep-speed", (0, 1), 240.0, _runnable(machine, speeds), OWN_QUEUES),
    ]


def experts(machine: Machine) -> list[Launch]:
    """Profiles: what a mixture of experts spends its time on, and ways to shorten it."""
    profile = {**_speed(machine, "qwen3-30b-a3b", 6, "profile", {}), "kind": "profile"}
    plain = [
        profile,
        _speed(machine, "qwen3-30b-a3b", 6, "none", {}),
        _speed(machine, "qwen3-30b-a3b", 6, "32k tokens, recompute moe_act", _selective("moe_act"), sequences=8),
        _speed(machine, "qwen3-30b-a3b", 6, "gradients added apart", {"fused_gradients": False}),
    ]
    one_product = [
        _speed(machine, "qwen3-30b-a3b", 6, "one product for all experts", {}),
        _speed(machine, "qwen3-30b-a3b", 6, "one product for all experts, apart", {"fused_gradients": False}),
        {**profile, "name": profile["name"] + ", one product for all experts"},
    ]
    return [
        Launch("experts", (0,), 100.0, plain),
        Launch("experts-cutlass", (1,), 100.0, one_product, ONE_PRODUCT),
    ]


def logprob(machine: Machine) -> list[Launch]:
    """Memory of scoring tokens with a vocabulary of 152 thousand."""
    tokens = (4096, 16384, 65536) if machine.cuda else (256, 1024)
    vocabulary, hidden = (151936, 4096) if machine.cuda else (4096, 64)
    cases: list[Case] = []
    for count in tokens:
        sizes = {"tokens": count, "vocabulary": vocabulary, "hidden": hidden, "limit_s": 40.0}
        chunks = (1024, 4096) if machine.cuda else (64,)
        cases += [
            {"name": f"{count} tokens, chunks of {chunk}", "kind": "scores", "whole": False, "chunk": chunk, **sizes}
            for chunk in chunks
        ]
        passed = _speed(machine, "qwen3-8b", 2, f"pass over {count} tokens", {}, sequences=count // 4096 or 1)
        cases.append({**passed, "kind": "pass", "limit_s": 60.0})
    for count in tokens[:2]:  # the last needs more memory than a GPU has
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
    "deepep": deepep,
    "experts": experts,
}


def _runnable(machine: Machine, cases: list[Case]) -> list[Case]:
    """The cases that this machine can run."""
    return [case for case in cases if machine.cuda or not _needs_gpu(case.get("options", {}))]


def _needs_gpu(options: dict[str, Any]) -> bool:
    only_on_gpus = {"offload_optimizer", "optimizer_offload_fraction", "optimizer_moments"}
    recomputed = options.get("recompute", {}).get("modules", ())
    dispatched = options.get("experts", {}).get("dispatcher") == "deepep"
    return (
        bool(only_on_gpus & options.keys())
        or options.get("context_parallel", 1) > 1
        or "moe_act" in recomputed
        or dispatched
    )


def _selective(*modules: str) -> dict[str, Any]:
    return {"recompute": {"granularity": "selective", "modules": list(modules)}}


def _speed(
    machine: Machine,
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
    """A case of `benchmarks.megatron.speed.speed`. `environment`: variables that libraries read at every call."""
    laptop = not machine.cuda
    layers = min(layers, 4) if laptop else layers
    folder = models.shape_folder(machine.scratch / "shapes", shape, layers, laptop=laptop)
    chunk = 4096 if machine.cuda else 64
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
        "steps": 2 if machine.quick else 3,
        "limit_s": 75.0,
        "environment": dict(environment or {}),
    }

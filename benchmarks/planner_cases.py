"""What was measured on H200s, case by case, as BENCHMARKS.md has it."""

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.shapes import cut
from millrace.megatron.architectures.published import PUBLISHED
from millrace.megatron.architectures.shape import ModelShape
from millrace.spec import JobSpec, parse

GB_TO_GIB = 1e9 / (1 << 30)
FULL = {"recompute": {"granularity": "full"}}
MLP = {"recompute": {"granularity": "selective", "modules": ["mlp", "layernorm"]}}
CHUNK = {"logprob_chunk_tokens": 4096}
MIXED_TOKENS = 130_000
"""Tokens of an update of `benchmarks.training`."""


def job(backend: str = "fsdp2", options: dict[str, Any] | None = None, **parts: Any) -> JobSpec:
    """A job with these backend options. `parts`: `lora`, `rollout`, `publication`, `schedule`, and fields of
    `trainer`."""
    return parse(
        {
            "name": "measured",
            "output": "/output",
            "model": {"path": "/model", "lora": parts.pop("lora", None)},
            "data": {"procedural": "reasoning_gym:spell_backward"},
            "rollout": {"max_response_tokens": 1024, **parts.pop("rollout", {})},
            "publication": parts.pop("publication", {}),
            "schedule": parts.pop("schedule", {}),
            "trainer": {"backend": backend, "backend_options": options or {}, **parts},
        }
    )


def untied(name: str, layers: int, vocabulary: int | None = None) -> ModelShape:
    """A published shape with fewer layers, and with a head of its own."""
    return replace(cut(PUBLISHED[name], layers, vocabulary), tied=False)


@dataclass(frozen=True)
class Measured:
    """One update of a job. Lengths are tokens."""

    name: str
    spec: JobSpec
    shape: ModelShape
    gpus: int
    sequences: int
    """Sequences of the whole update, over all ranks."""
    prompt: float
    response: float
    longest: int
    tokens: int
    """Tokens of a micro-batch."""
    seconds: float = 0.0
    """0: not measured."""
    gib: float = 0.0
    """Peak of the fullest GPU; 0: not measured."""
    why: str = ""
    """Why the predicted peak is off by more than the target."""


def even(
    name: str,
    spec: JobSpec,
    shape: ModelShape,
    seconds: float,
    gib: float,
    *,
    gpus: int = 1,
    copies: int = 1,
    tokens: int = 16384,
    batches: int = 2,
    length: int = 4096,
    why: str = "",
) -> Measured:
    """`batches` micro-batches of `tokens` tokens on each of `copies` data-parallel ranks, sequences of one length."""
    sequences = copies * batches * tokens // length
    return Measured(name, spec, shape, gpus, sequences, 0.0, length, length, tokens, seconds, gib, why)


def mixed(name: str, spec: JobSpec, shape: ModelShape, seconds: float, gb: float) -> Measured:
    """One update of `benchmarks.training` with lengths drawn from a geometric distribution."""
    sequences = round(MIXED_TOKENS / 461)
    return Measured(name, spec, shape, 1, sequences, 32, 429, 3040, 16384, seconds, gb * GB_TO_GIB)


def megatron(**options: Any) -> JobSpec:
    return job("megatron", {**CHUNK, **options})


DENSE_12, DENSE_8, DENSE_4 = (untied("qwen3-8b", layers) for layers in (12, 8, 4))
SMALL = untied("qwen3-1.7b", 28, 512)
EXPERTS_6, EXPERTS_8, EXPERTS_10 = (untied("qwen3-30b-a3b", layers) for layers in (6, 8, 10))
WHOLE = untied("qwen3-8b", 36)
EP2 = megatron(expert_parallel=2)
OFFLOAD = {"optimizer_offload_fraction": 1.0}
ULYSSES = {"sequence_parallel_size": 2}


def rate(tokens_per_s: float, tokens: int = 32768) -> float:
    """Seconds of an update of so many tokens."""
    return tokens / tokens_per_s


MEASURED_JOBS = (
    even("8B, 12 layers, Megatron", megatron(), DENSE_12, 1.17, 93.3),
    even("the same, recompute mlp", megatron(**MLP), DENSE_12, 1.34, 76.4),
    even("the same, recompute full", megatron(**FULL), DENSE_12, 1.42, 67.8),
    even("8B, 4 layers, Megatron", megatron(), DENSE_4, 0.56, 48.8),
    even("the same, optimizer offload 0.5", megatron(optimizer_offload_fraction=0.5), DENSE_4, 1.20, 41.2),
    even("the same, optimizer offload 1", megatron(**OFFLOAD), DENSE_4, 2.13, 26.2),
    even("8B, DP2, recompute full", megatron(**FULL), WHOLE, 3.82, 102.6, gpus=2, copies=2),
    even(
        "8B, PP2, recompute full",
        megatron(pipeline_parallel=2, **FULL),
        WHOLE,
        2.28,
        74.2,
        gpus=2,
        tokens=4096,
        batches=8,
    ),
    even(
        "8B, 16 layers, CP2",
        megatron(context_parallel=2),
        untied("qwen3-8b", 16),
        2.44,
        88.6,
        gpus=2,
        tokens=32768,
        length=32768,
    ),
    even("30B-A3B, 6 layers, Megatron", megatron(), EXPERTS_6, 0.86, 88.8),
    even("the same, recompute full", megatron(**FULL), EXPERTS_6, 0.96, 78.7),
    even("30B-A3B, 10 layers, EP2, 16k tokens", EP2, EXPERTS_10, 0.92, 82.5, gpus=2, copies=2),
    even("the same, 32k tokens", EP2, EXPERTS_10, 1.32, 100.5, gpus=2, copies=2, tokens=32768),
    even("30B-A3B, 8 layers, EP2, 64k tokens", EP2, EXPERTS_8, 2.03, 114.3, gpus=2, copies=2, tokens=65536),
    mixed("1.4B, mixed lengths, FSDP2", job(), SMALL, 2.56, 56),
    mixed("the same, Megatron", job("megatron"), SMALL, 2.39, 59),
    even("1.4B, even lengths, FSDP2", job(), SMALL, 2.90, 57 * GB_TO_GIB, batches=8),
    even("the same, Megatron", job("megatron"), SMALL, 2.61, 59 * GB_TO_GIB, batches=8),
    mixed("8B, 12 layers, mixed lengths, FSDP2", job(), DENSE_12, 4.87, 91),
    mixed("the same, Megatron", job("megatron"), DENSE_12, 4.59, 96),
    mixed("30B-A3B, 6 layers, mixed lengths, FSDP2", job(), EXPERTS_6, 2.14, 91),
    mixed("the same, Megatron", job("megatron"), EXPERTS_6, 3.36, 93),
    mixed("8B, mixed lengths, FSDP2, recompute", job(activation_recompute=True), WHOLE, 15.55, 146),
    mixed("the same, LoRA 32, no recompute", job(lora={"rank": 32}), WHOLE, 9.08, 106),
    even(
        "8B, 12 layers, 32k tokens a sequence, FSDP2, recompute, a micro-batch a GPU",
        job(activation_recompute=True),
        DENSE_12,
        2 * rate(21_150, 131_072),
        0.0,
        gpus=2,
        copies=2,
        tokens=131_072,
        batches=1,
        length=32_768,
    ),
    even(
        "the same, two GPUs share a micro-batch",
        job(options=ULYSSES, activation_recompute=True),
        DENSE_12,
        rate(19_869, 131_072),
        0.0,
        gpus=2,
        tokens=131_072,
        batches=1,
        length=32_768,
    ),
    even(
        "the same, 131k tokens a sequence",
        job(options=ULYSSES, activation_recompute=True),
        DENSE_12,
        rate(8_918, 131_072),
        0.0,
        gpus=2,
        tokens=131_072,
        batches=1,
        length=131_072,
    ),
    even("8B, 8 layers, FSDP2", job(), DENSE_8, rate(31_732), 65.1),
    even("the same, recompute", job(activation_recompute=True), DENSE_8, rate(26_782), 55.5),
    even("the same, offload activations", job(options={"offload_activations": True}), DENSE_8, rate(19_960), 55.5),
    even("the same, LoRA 32", job(lora={"rank": 32}), DENSE_8, rate(38_855), 28.9),
    even(
        "the same, LoRA 32, recompute",
        job(lora={"rank": 32}, activation_recompute=True),
        DENSE_8,
        rate(30_607),
        13.2,
    ),
    even("8B, 8 layers, Megatron", job("megatron"), DENSE_8, rate(33_321), 68.1),
    even("the same, recompute full", job("megatron", FULL), DENSE_8, rate(28_114), 52.3),
    even("the same, recompute mlp, layernorm", job("megatron", MLP), DENSE_8, rate(29_565), 58.1),
    even("the same, optimizer offload 1", job("megatron", OFFLOAD), DENSE_8, rate(10_294), 37.0),
    even("the same, LoRA 32", job("megatron", lora={"rank": 32}), DENSE_8, rate(38_935), 27.0),
)
"""Every update on H200s of which BENCHMARKS.md has seconds or a peak: "The megatron backend on GPUs", "FSDP2 beside
Megatron-Core" and "Memory, predicted and measured"."""

LOADED = "The engine generates meanwhile and shares the GPU's memory"
PUBLICATIONS = (
    ("Qwen3-1.7B to one GPU", "qwen3-1.7b", 1, 1, "shadow", 0.0171, ""),
    ("Qwen3-1.7B to one GPU", "qwen3-1.7b", 1, 1, "inplace", 0.0130, ""),
    ("Qwen3-8B to one GPU", "qwen3-8b", 1, 1, "shadow", 0.0764, ""),
    ("Qwen3-8B to one GPU", "qwen3-8b", 1, 1, "inplace", 0.0560, ""),
    ("Qwen3-8B from two GPUs to one", "qwen3-8b", 2, 1, "shadow", 0.0638, ""),
    ("Qwen3-8B from two GPUs to one", "qwen3-8b", 2, 1, "inplace", 0.0487, ""),
    ("Qwen3-30B-A3B to one GPU", "qwen3-30b-a3b", 1, 1, "shadow", 0.272, ""),
    ("Qwen3-30B-A3B to one GPU", "qwen3-30b-a3b", 1, 1, "inplace", 0.207, ""),
    ("Qwen3-8B into vLLM", "qwen3-8b", 1, 1, "shadow", 0.097, LOADED),
    ("Qwen3-8B into vLLM", "qwen3-8b", 1, 1, "inplace", 0.070, ""),
    ("Qwen3-30B-A3B into vLLM", "qwen3-30b-a3b", 1, 1, "shadow", 0.334, ""),
    ("Qwen3-30B-A3B into vLLM", "qwen3-30b-a3b", 1, 1, "inplace", 0.231, ""),
    ("Qwen3-30B-A3B, EP2 to TP2, into vLLM", "qwen3-30b-a3b", 2, 2, "shadow", 0.263, ""),
    ("Qwen3-30B-A3B, EP2 to TP2, into vLLM", "qwen3-30b-a3b", 2, 2, "inplace", 0.285, ""),
)
"""Model, trainer's GPUs, workers of the replica, how the version is put in place, seconds ("Publication on GPUs"), and
why the prediction is off by more than the target."""

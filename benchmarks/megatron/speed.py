"""Time and memory of training steps and of scoring."""

import math
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks.megatron import batches, models
from benchmarks.megatron.compare import job_spec
from benchmarks.training import update
from millrace.megatron.architectures import read_shape
from millrace.megatron.architectures.shape import sequence_cost
from services.trainer.backends import build
from services.trainer.protocol.backend import Backend
from services.trainer.ranks.world import World

GIB = 1 << 30


def speed(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Measures steps of `microbatches` micro-batches of `sequences` times `length` tokens on each data-parallel
    rank."""
    backend, built_s = _built(world, case)
    shape = read_shape(Path(case["model"]))
    batch = batches.even(case["microbatches"], case["sequences"], case["length"], shape)
    parts: dict[str, list[float]] = {"step": [], "forward_backward": [], "optimizer": []}
    _reset_peak()
    rest = torch.cuda.memory_allocated()
    for step in range(case["warmup"] + case["steps"]):
        times = _step(backend, batch)
        if step >= case["warmup"]:
            for name, seconds in zip(parts, times, strict=True):
                parts[name].append(seconds)
    tokens = sum(sum(part.lengths) for part in batch) * backend.data_parallel.size
    cost = sequence_cost(shape)
    flops = sum(cost.total(part.lengths) for part in batch) * backend.data_parallel.size
    step_s = sorted(parts["step"])[len(parts["step"]) // 2]
    matmul = matmul_flops(world)
    gpus = dist.get_world_size()
    return {
        "parameters": backend.parameters,
        "built_s": built_s,
        "median_s": {name: sorted(values)[len(values) // 2] for name, values in parts.items()},
        "tokens_per_s_per_gpu": tokens / step_s / gpus,
        "tflops_per_gpu": flops / step_s / gpus / 1e12,
        "matmul_tflops": matmul / 1e12,
        "mfu": flops / step_s / gpus / matmul if matmul else math.nan,
        "between_steps_gib": _largest(rest / GIB, world),
        "peak_gib": _largest(torch.cuda.max_memory_allocated() / GIB, world),
        "reserved_gib": _largest(torch.cuda.max_memory_reserved() / GIB, world),
        "host_gib": _largest(psutil.Process().memory_info().rss / GIB, world),
        "moe": backend.metrics(),
    }


def profiled(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """One step under torch's profiler: the time for which the GPU was busy, and on what host and GPU spent most
    time."""
    from torch.profiler import ProfilerActivity, profile

    backend, _ = _built(world, case)
    batch = batches.even(case["microbatches"], case["sequences"], case["length"], read_shape(Path(case["model"])))
    for _ in range(2):
        _step(backend, batch)
    plain_s = _step(backend, batch)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        profiled_s = _step(backend, batch)
    table = profiler.key_averages()
    by_host = sorted(table, key=lambda row: -row.self_cpu_time_total)[:30]
    by_gpu = sorted(table, key=lambda row: -row.self_device_time_total)[:30]
    return {
        "step_s": plain_s,
        "profiled_s": profiled_s,
        "gpu_s": sum(row.self_device_time_total for row in table) / 1e6,
        "host": {f"{row.key[:80]} x{row.count}": row.self_cpu_time_total / 1e6 for row in by_host},
        "gpu": {f"{row.key[:80]} x{row.count}": row.self_device_time_total / 1e6 for row in by_gpu},
    }


def scoring_head(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """The scoring head over `tokens` hidden states, forward and backward. With `whole` all logits are kept instead."""
    from services.trainer.backends.head import VocabularyPart, WantedTokens, scores

    tokens, vocabulary, hidden = case["tokens"], case["vocabulary"], case["hidden"]
    kind = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    hidden_rh = torch.randn(tokens, hidden, dtype=kind, device=world.device, requires_grad=True)
    weight_vh = (torch.randn(vocabulary, hidden, dtype=kind, device=world.device) * 0.02).requires_grad_()
    targets_r = torch.randint(0, vocabulary, (tokens,), device=world.device)
    wanted = WantedTokens(torch.arange(tokens, device=world.device), targets_r, 1.0)
    held, times = 0, []
    scored = torch.zeros(())
    for _ in range(3):
        hidden_rh.grad = weight_vh.grad = None
        _reset_peak()
        held = torch.cuda.memory_allocated()
        _synchronize()
        began = time.perf_counter()
        if case["whole"]:
            log_p = (hidden_rh @ weight_vh.t()).float().log_softmax(-1)
            entropy_r = -(log_p.exp() * log_p).sum(-1)
            scored = torch.stack([log_p.gather(1, targets_r[:, None])[:, 0], entropy_r])
            del log_p, entropy_r
        else:
            scored = scores(hidden_rh, weight_vh, wanted, VocabularyPart(0, vocabulary, None), case["chunk"])
        forward_gib = (torch.cuda.max_memory_allocated() - held) / GIB
        scored.sum().backward()
        _synchronize()
        times.append(time.perf_counter() - began)
    flops = 6.0 * tokens * vocabulary * hidden
    return {
        "forward_gib": forward_gib,
        "peak_gib": (torch.cuda.max_memory_allocated() - held) / GIB,
        "logits_gib": tokens * vocabulary * 4 / GIB,
        "s": min(times),
        "tflops": flops / min(times) / 1e12,
        "mean": float(scored.detach()[0].mean()),
    }


def logprob_pass(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """The backend's own pass for log-probabilities over one micro-batch of `sequences` times `length` tokens."""
    backend, _ = _built(world, case)
    shape = read_shape(Path(case["model"]))
    batch = batches.even(1, case["sequences"], case["length"], shape)
    times = []
    for _ in range(2):
        _reset_peak()
        held = torch.cuda.memory_allocated()
        _synchronize()
        began = time.perf_counter()
        backend.logprobs(batch, temperature=1.0)
        _synchronize()
        times.append(time.perf_counter() - began)
    tokens = case["sequences"] * case["length"]
    logits = tokens * shape.vocabulary * 4 / GIB
    return {
        "tokens": tokens,
        "peak_gib": (torch.cuda.max_memory_allocated() - held) / GIB,
        "logits_gib": logits,
        "s": min(times),
    }


def matmul_flops(world: World) -> float:
    """bf16 products of 8192 × 8192 matrices of random numbers, FLOP/s."""
    if world.device.type != "cuda":
        return 0.0
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=world.device) for _ in range(2))
    for _ in range(3):
        a @ b
    _synchronize()
    began = time.perf_counter()
    for _ in range(10):
        a @ b
    _synchronize()
    return 10 * 2 * 8192**3 / (time.perf_counter() - began)


def _built(world: World, case: dict[str, Any]) -> tuple[Backend, float]:
    began = time.perf_counter()
    models.draw_weights()
    backend = build(job_spec(case), world.device)
    _synchronize()
    return backend, time.perf_counter() - began


def _step(backend: Backend, batch: list[Any]) -> tuple[float, float, float]:
    """Seconds of an update, of its passes, and of its optimizer."""
    passes_s, optimizer_s, _ = update(backend, batch, batches.plain_loss)
    return passes_s + optimizer_s, passes_s, optimizer_s


def _largest(value: float, world: World) -> float:
    """The largest value of any rank."""
    total = torch.tensor([value], dtype=torch.float64, device=world.device)
    dist.all_reduce(total, dist.ReduceOp.MAX)
    return float(total)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()

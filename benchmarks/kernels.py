"""Time on the GPU by kind of kernel, from torch's profiler."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = (
    ("compiled by Inductor", ("triton_",)),
    ("optimizer and casts of many tensors", ("multi_tensor", "foreach", "chunk_cat", "split_with_sizes")),
    ("recurrence", ("chunk_", "l2norm", "recompute_w_u", "prepare_wy_repr", "merge_16x16", "solve_tril")),
    ("convolution", ("conv1d", "conv_depthwise")),
    ("attention", ("flash", "fmha", "attention")),
    ("matrix products", ("gemm", "cutlass", "nvjet", "cublas", "splitk")),
    ("collectives", ("nccl",)),
    ("copies of memory", ("memcpy", "memset")),
    ("element-wise", ("elementwise", "catarraybatched", "index", "scatter", "gather", "fill")),
    ("reductions", ("reduce", "softmax", "norm")),
)
"""Kinds of kernels with parts of names, in lower case. The first that fits counts."""
OTHER = "other"
SHOWN = 16
"""Kernels that are listed one by one."""


def kind_of(kernel: str) -> str:
    """The kind of a kernel with this name."""
    name = kernel.lower()
    return next((kind for kind, parts in KINDS if any(part in name for part in parts)), OTHER)


def by_kind(run: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Runs under the profiler. Seconds on the device, of each kind of kernel and of the longest kernels; on a host
    without a GPU seconds of operators."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        run()
    seconds, calls = defaultdict[str, float](float), defaultdict[str, int](int)
    for row in profiler.key_averages():
        seconds[row.key] += (row.self_device_time_total if on_gpu else row.self_cpu_time_total) / 1e6
        calls[row.key] += row.count
    kinds, total = defaultdict[str, float](float), sum(seconds.values())
    for name, spent in seconds.items():
        kinds[kind_of(name)] += spent
    longest = sorted(seconds, key=lambda name: -seconds[name])[:SHOWN]
    return {
        "busy_s": round(total, 4),
        "kinds": {kind: f"{spent:.4f} s, {spent / total:.1%}" for kind, spent in sorted(kinds.items(), key=_longest)},
        "longest": {f"{name[:140]} x{calls[name]}": f"{seconds[name]:.4f} s, {kind_of(name)}" for name in longest},
    }


def _longest(entry: tuple[str, float]) -> float:
    return -entry[1]

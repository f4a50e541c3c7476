"""Model FLOPs utilisation: what a step needs by the published formula, by what the devices could have done.

The FLOPs are the model's own (`backend.cost`: sequence lengths and attention included, of experts the active ones):
activations that are computed again and padding count for nothing, as in PaLM (arXiv 2204.02311).
"""

import functools
import time
from collections.abc import Mapping, Sequence

import torch

from millrace.batching.cost import SequenceCost

PEAK_TFLOPS = {
    "GB300": 2500.0,
    "GB200": 2500.0,
    "B300": 2250.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L20": 119.5,
}
"""Dense bf16, by part of the device's name, the longer names first. What is not here is measured."""

IDLE_S = 1e-4
"""A part that was over sooner had nothing to do."""
PARTS = {"update_actor": ("actor", 1.0), "old_log_prob": ("actor_infer", 1 / 3), "ref": ("ref", 1 / 3)}
"""Timing → metric, and its share of training's FLOPs: a forward pass is a third of forward and backward."""


def utilisation(
    cost: SequenceCost, device: torch.device, lengths: Sequence[int], timings: Mapping[str, float], ranks: int
) -> dict[str, float]:
    """perf/mfu/<part> of the parts that the step had, from `timing_s/<part>` and the lengths of all its sequences."""
    flops = cost.total(lengths)
    metrics = {}
    for timing, (part, share) in PARTS.items():
        seconds = timings.get(f"timing_s/{timing}", 0.0)
        if seconds > IDLE_S:
            metrics[f"perf/mfu/{part}"] = share * flops / seconds / ranks / peak_flops(device)
    return metrics


@functools.cache
def peak_flops(device: torch.device) -> float:
    """Dense FLOP/s of one device: published, or measured once where nothing is (a host without GPUs)."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, tflops in PEAK_TFLOPS.items():
            if part in name:
                return tflops * 1e12
    size, times = 1024, []
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.ones(size, size, dtype=dtype, device=device)
    for _ in range(3):
        began = time.perf_counter()
        float((a @ a)[0, 0])  # waits for the product
        times.append(time.perf_counter() - began)
    return 2 * size**3 / min(times)

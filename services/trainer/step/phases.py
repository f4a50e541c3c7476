"""Measures the phases of a step: seconds, memory and model FLOPs utilisation. That is the FLOPs that a step needs,
divided by those that the devices could have done.

The FLOPs are those of the model (`backend.cost`: with sequence lengths and attention, and only the active experts).
Recomputed activations and padding do not count, as in PaLM (arXiv 2204.02311).
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch

from millrace.sequence_cost import PASSES, SequenceCost
from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import span
from services.trainer.memory.meter import MemoryMeter

SPANS = {"fetch": SpanKind.FETCH, "update_actor": SpanKind.UPDATE, "update_critic": SpanKind.UPDATE}
"""The span of a phase of a step; all others assess the batch."""


class Clock:
    """Measures the phases of a step, wall-clock time and memory: `with clock("fetch"): ...`. A phase may be entered
    repeatedly."""

    def __init__(self, meter: MemoryMeter, tower_flops: Callable[[], float] = lambda: 0.0) -> None:
        """`tower_flops`: as `Backend.tower_flops`."""
        self.meter = meter
        self.flops: dict[str, float] = {}
        """FLOPs of a tower for images on this rank, by phase."""
        self._tower_flops = tower_flops
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Raises OutOfMemory if the device has no memory left in this phase."""
        began, before = time.perf_counter(), self._tower_flops()
        try:
            with self.meter.during(phase), span(SPANS.get(phase, SpanKind.ASSESS), detail=phase):
                yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - began
            self.flops[phase] = self.flops.get(phase, 0.0) + self._tower_flops() - before

    def metrics(self) -> dict[str, float]:
        """`timing_s/<phase>`, seconds."""
        return {f"timing_s/{phase}": seconds for phase, seconds in self._seconds.items()}


PEAK_TFLOPS = {
    "GB300": 2500.0,
    "GB200": 2500.0,
    "B300": 2250.0,
    "B200": 2250.0,
    "GH200": 989.4,
    "H200 NVL": 835.0,
    "H200": 989.4,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L20": 119.5,
}
"""Published bf16 rates without sparsity, by a part of the device's name, longer names first: H100 and H200 alone are
those with SXM. The rate of any other device is measured."""

PARTS = {
    "update_actor": ("actor", "actor"),
    "old_log_prob": ("actor_infer", "actor"),
    "ref": ("ref", "actor"),
    "update_critic": ("critic", "critic"),
}
"""Timing → metric and model."""


def utilisation(
    costs: Mapping[str, SequenceCost],
    device: torch.device,
    lengths: Sequence[int],
    timings: Mapping[str, float],
    forward_passes: Mapping[str, int],
    ranks: int,
    tower_flops: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, float]:
    """`perf/mfu/<part>` for each part of the step that computed, from `timing_s/<part>` and the lengths of all its
    sequences. `costs` are those of the step's models, `actor` and `critic`. `forward_passes`: how many each part made
    that only looks at its model; the other parts update theirs. `tower_flops`: those of a tower for images on all
    ranks in each part, of a frozen one forward only, of each image once for as long as its features are kept."""
    metrics = {}
    for timing, (part, model) in PARTS.items():
        passes = forward_passes.get(timing, PASSES)
        if passes and (seconds := timings.get(f"timing_s/{timing}", 0.0)):
            flops = passes / PASSES * costs[model].total(lengths) + tower_flops.get(timing, 0.0)
            metrics[f"perf/mfu/{part}"] = flops / seconds / ranks / peak_flops(device)
    return metrics


@functools.cache
def peak_flops(device: torch.device) -> float:
    """Dense FLOP/s of one device: the published rate, or a rate measured once (on a host without GPUs, for example)."""
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

"""Measures the phases of a step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

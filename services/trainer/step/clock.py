"""Measures the phases of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from millrace.telemetry.spans.kinds import SpanKind
from millrace.telemetry.spans.recorder import span
from services.trainer.memory.meter import MemoryMeter

SPANS = {"fetch": SpanKind.FETCH, "update_actor": SpanKind.UPDATE, "update_critic": SpanKind.UPDATE}
"""The span of a phase of a step; all others assess the batch."""


class Clock:
    """Measures the phases of a step, wall-clock time and memory: `with clock("fetch"): ...`. A phase may be entered
    repeatedly."""

    def __init__(self, meter: MemoryMeter) -> None:
        self.meter = meter
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Raises OutOfMemory if the device has no memory left in this phase."""
        began = time.perf_counter()
        try:
            with self.meter.during(phase), span(SPANS.get(phase, SpanKind.ASSESS), detail=phase):
                yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - began

    def metrics(self) -> dict[str, float]:
        """`timing_s/<phase>`, seconds."""
        return {f"timing_s/{phase}": seconds for phase, seconds in self._seconds.items()}

"""Who was busy with what at each instant of a window: spans on a grid of equal cells."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from millrace.telemetry.spans.kinds import LaneKind, SpanKind
from millrace.telemetry.spans.recorder import Span

CELLS_OF_A_STEP = 4000
MOST_CELLS = 20_000
WORK_OF_A_TRAINER = (SpanKind.TRAIN, SpanKind.PREPARE, SpanKind.TRANSFER, SpanKind.CONFIGURE, SpanKind.CHECKPOINT)
WORK_OF_AN_ENGINE = (SpanKind.GENERATE,)
Counts = NDArray[np.int32]
"""Number of spans in each cell."""
Lane = tuple[LaneKind, str]


@dataclass(frozen=True)
class Activity:
    """The spans of a window on a grid."""

    lanes: Mapping[Lane, Sequence[Span]]
    start_s: float
    end_s: float
    cells: int
    _known: dict[tuple[tuple[SpanKind, ...], LaneKind, str], Counts] = field(default_factory=dict, repr=False)
    """What `of_kind` has counted before: every replica asks for the same stages."""

    @classmethod
    def of(cls, lanes: Mapping[Lane, Sequence[Span]], start_s: float, end_s: float, steps: int = 1) -> "Activity":
        """The grid of a window over `steps` steps."""
        return cls(lanes, start_s, end_s, min(MOST_CELLS, CELLS_OF_A_STEP * max(1, steps)))

    @property
    def cell_s(self) -> float:
        """Seconds of one cell."""
        return max(self.end_s - self.start_s, 1e-9) / self.cells

    def counts(self, spans: Iterable[Span]) -> Counts:
        """How many of the spans each cell lies in: a cell belongs to a span that covers its middle."""
        times = np.array([(span.start_s, span.end_s) for span in spans], dtype=np.float64).reshape(-1, 2)
        edges = np.clip(np.rint((times - self.start_s) / self.cell_s), 0, self.cells).astype(np.int64)
        changes = np.zeros(self.cells + 1, dtype=np.int64)
        np.add.at(changes, edges[:, 0], 1)
        np.add.at(changes, edges[:, 1], -1)
        counts: Counts = np.cumsum(changes[:-1]).astype(np.int32)
        return counts

    def of_kind(self, *kinds: SpanKind, lane: LaneKind, member: str = "") -> Counts:
        """The spans of these kinds in the lanes of a kind, of all members or of one."""
        key = (kinds, lane, member)
        if key not in self._known:
            self._known[key] = self.counts(
                span
                for (kind, name), spans in self.lanes.items()
                if kind is lane and (not member or name == member)
                for span in spans
                if span.kind in kinds
            )
        return self._known[key]

    @cached_property
    def replicas(self) -> list[str]:
        """The replicas that have spans."""
        return sorted(name for kind, name in self.lanes if kind is LaneKind.ROLLOUT)

    @cached_property
    def generating(self) -> Counts:
        """Samples that are generated, in all replicas."""
        return self.of_kind(*WORK_OF_AN_ENGINE, lane=LaneKind.ROLLOUT)

    @cached_property
    def busy_replicas(self) -> Counts:
        """Replicas that generate."""
        busy = [self.of_kind(*WORK_OF_AN_ENGINE, lane=LaneKind.ROLLOUT, member=name) > 0 for name in self.replicas]
        return np.sum(busy, axis=0, dtype=np.int32) if busy else np.zeros(self.cells, dtype=np.int32)

    @cached_property
    def training(self) -> NDArray[np.bool_]:
        """The instants at which the trainer works on something for the job."""
        trained: NDArray[np.bool_] = self.of_kind(*WORK_OF_A_TRAINER, lane=LaneKind.TRAINER) > 0
        return trained

    def stage(self, *kinds: SpanKind) -> NDArray[np.bool_]:
        """The instants at which the coordinator is in one of these stages."""
        where: NDArray[np.bool_] = self.of_kind(*kinds, lane=LaneKind.COORDINATOR) > 0
        return where

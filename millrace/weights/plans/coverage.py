"""How many elements of a storage its strided views cover, each counted once. Torch-free."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from millrace.weights.plans.views import Strided


@dataclass(frozen=True, order=True)
class _Runs:
    """A view as equally long runs of contiguous elements. Views of the same elements give equal objects."""

    start: int
    run: int
    repeated: tuple[tuple[int, int], ...]
    """(stride, extent), the smallest stride first."""

    @property
    def numel(self) -> int:
        return self.run * math.prod(extent for _, extent in self.repeated)

    @property
    def end(self) -> int:
        return self.start + self.run + sum(stride * (extent - 1) for stride, extent in self.repeated)


def covered_elements(views: Iterable[Strided]) -> int:
    """Number of elements that are in at least one of the views."""
    together: list[_Runs] = []
    total = end = 0
    for runs in sorted({_runs(view) for view in views if all(view[1])}):
        if runs.start >= end:
            total, together = total + _distinct(together), []
        together.append(runs)
        end = max(end, runs.end)
    return total + _distinct(together)


def _runs(view: Strided) -> _Runs:
    start, extents, strides = view
    repeated: list[tuple[int, int]] = []
    run = 1
    for stride, extent in sorted((s, e) for s, e in zip(strides, extents, strict=True) if e > 1 and s):
        if stride == run and not repeated:
            run *= extent
        else:
            repeated.append((stride, extent))
    return _Runs(start, run, tuple(repeated))


def _distinct(together: list[_Runs]) -> int:
    """Number of distinct elements in views whose ranges overlap."""
    if len(together) < 2:
        return sum(runs.numel for runs in together)
    base, end = together[0].start, max(runs.end for runs in together)
    # No run begins or ends inside a unit of this many elements.
    unit = math.gcd(*(n for r in together for n in (r.start - base, r.run, *(stride for stride, _ in r.repeated))))
    held = np.zeros((end - base) // unit, bool)
    for runs in together:
        shape = (*(extent for _, extent in runs.repeated), runs.run // unit)
        strides = (*(stride // unit for stride, _ in runs.repeated), 1)
        np.lib.stride_tricks.as_strided(held[(runs.start - base) // unit :], shape, strides)[...] = True
    return int(held.sum()) * unit

"""Distributions of values within a step. They are no step metrics: the coordinator keeps them apart, and the page draws
them."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from millrace.telemetry.metrics.catalogue import complain
from millrace.telemetry.metrics.declaration import Owner, Unit

BINS = 20
"""Most bins of a histogram whose edges follow the values."""
STEPS_KEPT = 5000
"""The newest steps of a job whose histograms are kept."""


@dataclass(frozen=True)
class Histogram:
    """How many values are in each bin. A bin has its lower edge; the last one has both of its edges."""

    edges: tuple[float, ...]
    """Ascending, one more than bins. Both are the same if all values are equal."""
    counts: tuple[int, ...]


@dataclass(frozen=True)
class StepHistogram:
    """The declaration of a histogram."""

    key: str
    unit: Unit
    owner: Owner
    meaning: str
    """One sentence in Markdown."""
    edges: tuple[float, ...] | None = None
    """The same edges in every step; a value outside of them is counted in the nearest bin. None: up to `BINS` bins of
    the same width between the least and the greatest value of the step."""
    whole_numbers: bool = False
    """Whether the values are whole numbers; each bin is then for the same number of them."""

    def of(self, values: ArrayLike) -> Histogram | None:
        """The histogram of the finite values; None if there are none. The values may have any shape."""
        found = np.asarray(values, dtype=np.float64).ravel()
        found = found[np.isfinite(found)]
        if not found.size:
            return None
        edges = np.asarray(self.edges) if self.edges else self._between(float(found.min()), float(found.max()))
        last = len(edges) - 2
        bins = np.clip(np.searchsorted(edges, found, side="right") - 1, 0, last)
        counts = np.bincount(bins, minlength=last + 1)
        return Histogram(tuple(edges.tolist()), tuple(counts.tolist()))

    def _between(self, least: float, greatest: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        if self.whole_numbers:
            width = math.ceil((greatest - least + 1) / BINS)
            return least + width * np.arange(math.ceil((greatest - least + 1) / width) + 1, dtype=np.float64)
        return np.linspace(least, greatest, BINS + 1) if greatest > least else np.array([least, greatest])


RATIOS = (0.1, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1.001, 1.01, 1.02, 1.05, 1.1, 1.25, 2.0, 10.0)
"""Edges for quotients of probabilities, finest near 1."""

SCORES = StepHistogram(
    "critic/score", Unit.REWARD, Owner.COORDINATOR, "Reward of each episode, as `critic/score/mean` has it."
)
RESPONSE_LENGTHS = StepHistogram(
    "response_length",
    Unit.TOKENS,
    Owner.COORDINATOR,
    "Tokens of each response, sampled and given.",
    whole_numbers=True,
)
STALENESS = StepHistogram(
    "training/staleness",
    Unit.VERSIONS,
    Owner.COORDINATOR,
    "The trainer's version minus the oldest version in each trajectory.",
    whole_numbers=True,
)
IMPORTANCE_RATIOS = StepHistogram(
    "training/importance_ratio",
    Unit.RATIO,
    Owner.TRAINER,
    "Probability of each sampled token under the weights that the step began with, divided by the one that the engine"
    " reported.",
    edges=RATIOS,
)
ADVANTAGES = StepHistogram(
    "critic/advantages",
    Unit.REWARD,
    Owner.TRAINER,
    "Advantage of each sampled token.",
)
STEP_HISTOGRAMS = (SCORES, RESPONSE_LENGTHS, STALENESS, IMPORTANCE_RATIOS, ADVANTAGES)
_BY_KEY = {declared.key: declared for declared in STEP_HISTOGRAMS}


def find(key: str) -> StepHistogram | None:
    """The declaration of `key`; None if there is none."""
    return _BY_KEY.get(key)


def declared(found: dict[str, Histogram], owner: Owner) -> dict[str, Histogram]:
    """The histograms that are declared as measured by `owner`. Any other raises UndeclaredMetric in strict mode;
    otherwise it is logged once and left out."""
    fitting = {}
    for key, histogram in found.items():
        declaration = find(key)
        if declaration is not None and declaration.owner is owner:
            fitting[key] = histogram
        else:
            complain(key, f"is not declared as a histogram of the {owner}")
    return fitting

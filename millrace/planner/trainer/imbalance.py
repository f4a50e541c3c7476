"""What is lost where ranks wait for the fullest of them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

WASTE = 0.001
"""Waiting where ranks meet in every micro-batch, for each data-parallel rank (BENCHMARKS.md, "Packing and balancing":
0.62 % over 8 ranks, 3.4 % over 32)."""
MOST_WASTE = 0.1
EXPERT_SPREAD = 0.8
"""Standard deviation of the tokens of an expert over their mean, in a micro-batch of a trained model. Not measured
here: SGLang reports that spreading DeepSeek-V3's experts evenly over 32 ranks makes prefill 1.49 times as fast."""


def planned_waste(ranks: int) -> float:
    """Share of time that data-parallel ranks wait for each other, with Millrace's plan of micro-batches."""
    return min(MOST_WASTE, WASTE * (ranks - 1))


@dataclass(frozen=True)
class Imbalance:
    packing: Callable[[int], float] = planned_waste
    """Share of time lost where data-parallel ranks meet in every micro-batch, by their number."""
    expert_spread: float = EXPERT_SPREAD
    """0: every expert has the same number of tokens."""

    def fullest(self, experts: int, ranks: int) -> float:
        """Tokens of the fullest of the expert-parallel ranks over their mean: the largest of `ranks` normal values,
        each the mean of the experts of one rank."""
        if ranks <= 1:
            return 1.0
        return 1.0 + self.expert_spread * math.sqrt(2 * math.log(ranks) * ranks / experts)


PLANNED = Imbalance()

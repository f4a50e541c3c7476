"""How well a plan uses its micro-batches and its ranks, next to what one gets without planning."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.batching.cost import SequenceCost
from millrace.batching.plan import Plan, plan_microbatches


@dataclass(frozen=True)
class PlanReport:
    """Shares are of 1; a plan without waste and with equal ranks has 0 in all of them."""

    microbatches: int
    """On each rank."""
    waste: float
    """Share of the token budget of all micro-batches that holds no token."""
    excess_microbatches: int
    """More on each rank than the tokens would need if they could be cut anywhere."""
    imbalance: float
    """How much more than the mean the costliest rank has to do."""
    lockstep_imbalance: float
    """The same where ranks meet in each micro-batch: the sum of each one's costliest rank over the mean."""


def report(plan: Plan, lengths: Sequence[int], *, token_budget: int, cost: SequenceCost) -> PlanReport:
    """Ranks with fewer micro-batches than others count as waiting."""
    count = max(map(len, plan))
    capacity = len(plan) * token_budget
    loads = [[cost.total(lengths[index] for index in members) for members in bins] for bins in plan]
    padded = [row + [0.0] * (count - len(row)) for row in loads]
    mean = sum(map(sum, loads)) / len(plan)
    return PlanReport(
        microbatches=count,
        waste=1 - sum(lengths) / (count * capacity),
        excess_microbatches=count - max(1, -(-sum(lengths) // capacity)),
        imbalance=max(map(sum, loads)) / mean - 1,
        lockstep_imbalance=sum(map(max, zip(*padded, strict=True))) / mean - 1,
    )


def unplanned(lengths: Sequence[int], *, ranks: int, token_budget: int) -> Plan:
    """The plain way, to compare with: equal shares in the order they come, each cut where the budget is full."""
    plan: Plan = []
    for rank in range(ranks):
        bins: list[list[int]] = [[]]
        room = token_budget
        for index in range(rank * len(lengths) // ranks, (rank + 1) * len(lengths) // ranks):
            if lengths[index] > room and bins[-1]:
                bins.append([])
                room = token_budget
            bins[-1].append(index)
            room -= lengths[index]
        plan.append(bins)
    return plan


def compared(
    lengths: Sequence[int], *, ranks: int, token_budget: int, cost: SequenceCost
) -> tuple[PlanReport, PlanReport]:
    """The report of `plan_microbatches` and that of `unplanned` on the same sequences."""
    planned = plan_microbatches(lengths, ranks=ranks, token_budget=token_budget, cost=cost)
    plain = unplanned(lengths, ranks=ranks, token_budget=token_budget)
    return (
        report(planned, lengths, token_budget=token_budget, cost=cost),
        report(plain, lengths, token_budget=token_budget, cost=cost),
    )


def lognormal_lengths(count: int, *, mean: float, longest: int, seed: int, sigma: float = 1.0) -> list[int]:
    """Lengths like those of reasoning answers: lognormal with this mean, cut off at `longest`."""
    draw = random.Random(seed)
    centre = math.log(mean) - sigma * sigma / 2
    return [min(longest, max(1, round(draw.lognormvariate(centre, sigma)))) for _ in range(count)]

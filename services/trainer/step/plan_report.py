"""How well a plan uses its micro-batches and its ranks, compared with a division without planning."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.sequence_cost import SequenceCost
from services.trainer.step.planning import Plan, plan_microbatches


@dataclass(frozen=True)
class PlanReport:
    """Figures of a plan. Except for `microbatches`, all are 0 for a plan without waste and with equal ranks."""

    microbatches: int
    """Number of micro-batches of each rank."""
    waste: float
    """Part of the token budget of all micro-batches that holds no token, from 0 to 1."""
    excess_microbatches: int
    """Micro-batches of each rank beyond the number needed if sequences could be cut anywhere."""
    imbalance: float
    """Cost of the costliest rank over the mean cost of the ranks, minus 1."""
    lockstep_imbalance: float
    """Sum over the micro-batches of the costliest rank's cost, over the mean cost of the ranks, minus 1: the imbalance
    where all ranks wait for each other in each micro-batch."""


def report(plan: Plan, lengths: Sequence[int], *, token_budget: int, cost: SequenceCost) -> PlanReport:
    """The figures of `plan`. A rank with fewer micro-batches than others is counted as waiting for them."""
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
    """A simple division to compare with: equal shares of the sequences in their order, cut where the budget is full."""
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
    """The reports of `plan_microbatches` and of `unplanned` for the same sequences."""
    planned = plan_microbatches(lengths, ranks=ranks, token_budget=token_budget, cost=cost)
    plain = unplanned(lengths, ranks=ranks, token_budget=token_budget)
    return (
        report(planned, lengths, token_budget=token_budget, cost=cost),
        report(plain, lengths, token_budget=token_budget, cost=cost),
    )


def lognormal_lengths(count: int, *, mean: float, longest: int, seed: int, sigma: float = 1.0) -> list[int]:
    """Lengths similar to those of reasoning answers: lognormal with this mean, at most `longest`."""
    draw = random.Random(seed)
    centre = math.log(mean) - sigma * sigma / 2
    return [min(longest, max(1, round(draw.lognormvariate(centre, sigma)))) for _ in range(count)]

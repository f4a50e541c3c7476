"""Packing and balancing on long-tailed lengths, beside verl's published scheme and beside no balancing.

    python -m benchmarks.packing --sequences 8192 --ranks 8,32 --budget 32768

Lengths are lognormal, mean 2000, cut off at 32768; costs are those of the Qwen3-8B shape, attention included. Needs no
GPU and no torch. Prints a table:

* ours: `services.trainer.step.planning.plan_microbatches`, as the trainer plans every step;
* verl, by tokens: sequences to ranks by Karmarkar-Karp in equal numbers, then on each rank as many micro-batches as the
  rank with the most tokens needs, again by Karmarkar-Karp (`use_dynamic_bsz`, HybridFlow, arXiv 2409.19256);
* verl, by workload: the same with its later estimate of cost, 24576 · s + s², in place of s;
* in order: equal shares in the order they come, each cut where the budget is full.

verl's partitions do not look at the budget: `fullest` is the largest micro-batch by the budget, above 1 is memory that
nobody planned for.
"""

import argparse
import math
import random
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from millrace.sequence_cost import AttentionLayer, SequenceCost
from services.trainer.step.planning import (
    Plan,
    equal_partition,
    partition,
    plan_microbatches,
    report,
)

QWEN3_8B = SequenceCost.of_model(7.57e9, [AttentionLayer(32 * 128, 32 * 128)] * 36)
VERL_WORKLOAD = SequenceCost(24576.0, 1.0)


def lognormal_lengths(count: int, *, mean: float, longest: int, seed: int, sigma: float = 1.0) -> list[int]:
    """Lengths similar to those of reasoning answers: lognormal with this mean, at most `longest`."""
    draw = random.Random(seed)
    centre = math.log(mean) - sigma * sigma / 2
    return [min(longest, max(1, round(draw.lognormvariate(centre, sigma)))) for _ in range(count)]


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


def verl(lengths: Sequence[int], *, ranks: int, token_budget: int, cost: SequenceCost) -> Plan:
    """Written from its description: nothing of it is copied."""
    costs = [cost.of(length) for length in lengths]
    shares = equal_partition(costs, ranks)
    count = max(-(-sum(lengths[index] for index in share) // token_budget) for share in shares)
    return [
        [[share[at] for at in members] for members in partition([costs[index] for index in share], count)]
        for share in shares
    ]


class Line(NamedTuple):
    waste: float
    imbalance: float
    lockstep_imbalance: float
    microbatches: float
    fullest: float
    seconds: float


def measured(scheme: str, lengths: Sequence[int], ranks: int, budget: int) -> Line:
    began = time.perf_counter()
    match scheme:
        case "ours":
            plan = plan_microbatches(lengths, ranks=ranks, token_budget=budget, cost=QWEN3_8B, lockstep=False)
        case "verl, by tokens":
            plan = verl(lengths, ranks=ranks, token_budget=budget, cost=SequenceCost(1.0))
        case "verl, by workload":
            plan = verl(lengths, ranks=ranks, token_budget=budget, cost=VERL_WORKLOAD)
        case _:
            plan = unplanned(lengths, ranks=ranks, token_budget=budget)
    seconds = time.perf_counter() - began
    figures = report(plan, lengths, token_budget=budget, cost=QWEN3_8B)
    fullest = max(sum(lengths[index] for index in members) for bins in plan for members in bins) / budget
    return Line(figures.waste, figures.imbalance, figures.lockstep_imbalance, figures.microbatches, fullest, seconds)


SCHEMES = ("ours", "verl, by tokens", "verl, by workload", "in order")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=8192)
    parser.add_argument("--ranks", default="8,32")
    parser.add_argument("--budget", type=int, default=32768, help="tokens in a micro-batch")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    print("| ranks | scheme | waste | slowest rank over mean | in lockstep | micro-batches | fullest | s |")
    print("|---|---|---|---|---|---|---|---|")
    for ranks in map(int, options.ranks.split(",")):
        for scheme in SCHEMES:
            lines = []
            for seed in range(options.seeds):
                lengths = lognormal_lengths(options.sequences, mean=2000, longest=32768, seed=seed)
                lines.append(measured(scheme, lengths, ranks, options.budget))
            worst = [max(column) for column in zip(*lines, strict=True)]
            middle = [statistics.mean(column) for column in zip(*lines, strict=True)]
            print(
                f"| {ranks} | {scheme} | {middle[0]:.2%} ({worst[0]:.2%}) | {middle[1]:.2%} ({worst[1]:.2%}) "
                f"| {middle[2]:.2%} | {middle[3]:.1f} | {worst[4]:.2f} | {middle[5]:.2f} |"
            )


if __name__ == "__main__":
    main()

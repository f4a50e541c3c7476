"""Plans keep every sequence once, every micro-batch within the budget and the ranks alike."""

import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.packing import lognormal_lengths, unplanned
from millrace.errors import InvalidJob
from millrace.sequence_cost import SequenceCost
from services.trainer.step.planning import plan_microbatches, repack, report

ATTENTION = SequenceCost(1.0, 1 / 54_000)
"""An 8-billion-parameter model: at 54,000 tokens attention costs as much as all matrix products."""


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 100), max_size=40),
    ranks=st.integers(1, 6),
    slack=st.integers(0, 150),
    lockstep=st.booleans(),
)
@example(lengths=[1, 1, 1, 2], ranks=2, slack=0, lockstep=False)
def test_what_holds_of_every_plan(lengths, ranks, slack, lockstep):
    budget = max(lengths, default=1) + slack
    plan = plan_microbatches(lengths, ranks=ranks, token_budget=budget, cost=ATTENTION, lockstep=lockstep)
    members = [index for bins in plan for microbatch in bins for index in microbatch]
    assert sorted(members) == list(range(len(lengths)))
    assert len(plan) == ranks
    assert len({len(bins) for bins in plan}) == 1
    microbatches = [microbatch for bins in plan for microbatch in bins]
    assert all(sum(lengths[index] for index in microbatch) <= budget for microbatch in microbatches)
    assert all(microbatch == sorted(microbatch) for microbatch in microbatches)
    if len(lengths) >= len(microbatches):
        assert all(microbatches)
    for bins in plan:
        loads = [ATTENTION.total(lengths[index] for index in microbatch) for microbatch in bins]
        assert loads == pytest.approx(sorted(loads, reverse=True))
    assert plan == plan_microbatches(lengths, ranks=ranks, token_budget=budget, cost=ATTENTION, lockstep=lockstep)


@given(
    lengths=st.lists(st.integers(1, 60), max_size=30),
    ranks=st.integers(1, 4),
    budget=st.integers(60, 200),
    other=st.integers(60, 400),
)
def test_another_budget_on_the_same_ranks(lengths, ranks, budget, other):
    plan = plan_microbatches(lengths, ranks=ranks, token_budget=budget, cost=ATTENTION)
    found = repack(plan, lengths, token_budget=other, cost=ATTENTION)
    shares = [[sorted(index for members in bins for index in members) for bins in each] for each in (plan, found)]
    assert shares[0] == shares[1]
    assert len({len(bins) for bins in found}) == 1
    assert all(sum(lengths[index] for index in members) <= other for bins in found for members in bins)
    if other >= sum(lengths):
        assert len(found[0]) == 1


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30), ranks=st.integers(1, 4))
def test_no_more_micro_batches_than_the_plain_way_needs(lengths, ranks):
    plain = unplanned(lengths, ranks=ranks, token_budget=60)
    assert len(plan_microbatches(lengths, ranks=ranks, token_budget=60)[0]) <= max(map(len, plain))


def test_by_hand():
    plan = plan_microbatches([4, 6, 5, 5, 10, 10], ranks=2, token_budget=10)
    assert sorted(sorted(bins) for bins in plan) == [[[0, 1], [5]], [[2, 3], [4]]]


def test_long_sequences_count_for_their_attention():
    lengths = [8000, *[1000] * 8]
    heavy, light = SequenceCost(0.0, 1.0), SequenceCost(1.0, 0.0)
    by_attention = plan_microbatches(lengths, ranks=2, token_budget=16000, cost=heavy, lockstep=False)
    by_tokens = plan_microbatches(lengths, ranks=2, token_budget=16000, cost=light, lockstep=False)
    assert sorted(sum(lengths[i] for b in bins for i in b) for bins in by_tokens) == [8000, 8000]
    with_long = next(bins for bins in by_attention if any(0 in microbatch for microbatch in bins))
    assert sum(map(len, with_long)) <= 5


@pytest.mark.parametrize("seed", range(3))
def test_lognormal_lengths_waste_little_and_keep_ranks_together(seed):
    lengths = lognormal_lengths(8192, mean=2000, longest=32_768, seed=seed)
    size = {"ranks": 8, "token_budget": 32_768}
    plans = (plan_microbatches(lengths, **size, cost=ATTENTION), unplanned(lengths, **size))
    planned, plain = (report(plan, lengths, token_budget=32_768, cost=ATTENTION) for plan in plans)
    assert planned.microbatches == -(-sum(lengths) // (8 * 32_768)), "the fewest, as if sequences could be cut"
    assert planned.waste < 0.02 < plain.waste
    assert planned.imbalance < 0.01 and planned.lockstep_imbalance < 0.03
    assert plain.lockstep_imbalance > 0.1


def test_reports_by_hand():
    result = report([[[0], [1]], [[2], []]], [6, 2, 4], token_budget=8, cost=SequenceCost())
    assert result.microbatches == 2
    assert result.waste == pytest.approx(1 - 12 / 32)
    assert result.imbalance == pytest.approx(8 / 6 - 1)
    assert result.lockstep_imbalance == pytest.approx((6 + 2) / 6 - 1)


def test_refusals():
    with pytest.raises(InvalidJob, match=r"token_budget = 10: sequence 1 has 12 tokens.*at least 12"):
        plan_microbatches([3, 12, 5], ranks=1, token_budget=10)
    with pytest.raises(ValueError, match="0 ranks"):
        plan_microbatches([3], ranks=0, token_budget=10)
    with pytest.raises(ValueError, match="lengths 0"):
        plan_microbatches([3, 0], ranks=1, token_budget=10)


def test_fewer_sequences_than_ranks_leave_empty_micro_batches():
    assert plan_microbatches([5], ranks=2, token_budget=8) == [[[0]], [[]]]
    assert plan_microbatches([], ranks=2, token_budget=8) == [[[]], [[]]]


def test_planning_imports_no_torch():
    code = "import sys, services.trainer.step.planning; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

"""The masks of the policy loss against their definitions on plain lists."""

import math
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.algorithms.tokens import high_entropy, off_policy
from tests.rl.batches import make_batch, ragged


@pytest.mark.parametrize("fraction", [1e-6, 0.05, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_at_or_above_the_quantile_of_the_batch_are_kept(fraction, seed):
    """The quantile by linear interpolation, as TRL's; more columns and another order change nothing."""
    batch = make_batch(seed)
    entropy_bt = batch.values_bt.abs()
    kept_bt, threshold = high_entropy(entropy_bt, batch.mask_bt, fraction)
    ordered = sorted(chain(*ragged(entropy_bt, batch.mask_bt)))
    place = (1 - fraction) * (len(ordered) - 1)
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    quantile = below + (above - below) * (place - math.floor(place))
    expected = [[entropy >= quantile - 1e-12 for entropy in row] for row in ragged(entropy_bt, batch.mask_bt)]
    assert ragged(kept_bt, batch.mask_bt) == expected and not (kept_bt & ~batch.mask_bt).any()
    assert threshold == min(entropy for entropy in ordered if entropy >= quantile - 1e-12)
    order, wider = [3, 9, 0, 1, 8, 7, 2, 5, 6, 4], batch.padded(2)
    other_bt, _ = high_entropy(wider.values_bt.abs()[order], wider.mask_bt[order], fraction)
    assert other_bt[:, :-2].equal(kept_bt[order])


@given(st.lists(st.floats(0, 10, width=32), min_size=1, max_size=30), st.floats(0.01, 1))
def test_the_share_is_kept_at_least_one_and_ties_together(entropies, fraction):
    entropy_bt = torch.tensor([entropies])
    kept_bt, threshold = high_entropy(entropy_bt, torch.ones_like(entropy_bt), fraction)
    least = math.floor(fraction * (len(entropies) - 1) + 1e-9) + 1
    assert kept_bt.sum() >= least
    assert int((entropy_bt > threshold).sum()) < least
    assert kept_bt.equal(entropy_bt >= threshold)


def test_without_any_token_nothing_is_kept():
    kept_bt, threshold = high_entropy(torch.full((2, 3), math.nan), torch.zeros(2, 3), 0.2)
    assert not kept_bt.any() and threshold == 0


@pytest.mark.parametrize("limit", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("sequence_advantages", [True, False])
def test_negative_tokens_of_sequences_that_the_policy_left_are_masked(limit, sequence_advantages):
    batch = make_batch(4, drift=0.5, sequence_advantages=sequence_advantages)
    tensors = batch.logprobs_bt, batch.old_logprobs_bt, batch.advantages_bt
    masked_bt = off_policy(*tensors, batch.mask_bt, limit)
    assert not (masked_bt & ~batch.mask_bt).any()
    columns = (ragged(values_bt, batch.mask_bt) for values_bt in (*tensors, masked_bt))
    for logprobs, old, advantages, masked in zip(*columns, strict=True):
        moved = math.fsum(b - a for a, b in zip(logprobs, old, strict=True)) / max(len(old), 1)
        assert masked == [advantage < 0 and moved > limit for advantage in advantages]
    rows = [5, 2, 7]
    wider = batch.rows(rows).padded(3)
    part_bt = off_policy(wider.logprobs_bt, wider.old_logprobs_bt, wider.advantages_bt, wider.mask_bt, limit)
    assert part_bt[:, :-3].equal(masked_bt[rows])


def test_the_off_policy_mask_by_hand():
    """Both answers have moved by a mean of 0.6 nats a token, in opposite directions; A = 0 is not negative."""
    old_bt = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    logprobs_bt = old_bt + torch.tensor([[-2.0, 0.8, 99.0], [2.0, -0.8, 99.0]])
    advantages_bt = torch.tensor([[-1.0, 0.0, -1.0], [-1.0, -1.0, -1.0]])
    mask_bt = torch.tensor([[1, 1, 0], [1, 1, 0]])
    for limit, masked in ((0.5, True), (0.6 + 1e-6, False)):
        found_bt = off_policy(logprobs_bt, old_bt, advantages_bt, mask_bt, limit)
        assert found_bt.tolist() == [[masked, False, False], [False] * 3]
    extreme_bt = off_policy(old_bt - 1e4, old_bt, -torch.ones(2, 3), mask_bt, 100.0)
    assert extreme_bt.equal(mask_bt.bool())

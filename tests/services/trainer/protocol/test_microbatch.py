"""Packing samples: what is told of each token stays beside it."""

import numpy as np
import pytest
import torch

from services.trainer.backends.fsdp2.sequence_parallel import SequenceGroup
from services.trainer.protocol.microbatch import MicroBatch, Sample, Turn


def sample(prompt: int, response: int, **more: object) -> Sample:
    tokens = np.arange(prompt + response, dtype=np.int32)
    return Sample("s", tokens[:prompt], tokens[prompt:], np.zeros(response, np.float32), 0.0, **more)  # type: ignore[arg-type]


def test_experts_follow_their_tokens_and_are_unknown_where_none_were_told() -> None:
    told = np.arange(5 * 2 * 3, dtype=np.int16).reshape(5, 2, 3)
    batch = MicroBatch.pack([sample(1, 2), sample(2, 3, experts=told)], [1, 0])
    assert batch.experts_plk is not None and batch.experts_plk.shape == (8, 2, 3)
    assert np.array_equal(batch.experts_plk[:5].numpy(), told)
    assert (batch.experts_plk[5:] == -1).all()


def test_without_experts_there_are_none() -> None:
    assert MicroBatch.pack([sample(1, 2)], [0]).experts_plk is None
    assert MicroBatch.pack([], []).experts_plk is None


def test_padding_is_a_sequence_of_its_own_that_is_not_scored() -> None:
    told = np.zeros((5, 2, 3), np.int16)
    batch = MicroBatch.pack([sample(2, 3, experts=told), sample(1, 1)], [0, 1])
    padded = batch.padded(4)
    assert padded.lengths == (5, 2, 1) and padded.sampled_lengths == (3, 1, 0)
    assert padded.tokens_p[:7].equal(batch.tokens_p) and padded.positions_p.tolist() == [0, 1, 2, 3, 4, 0, 1, 0]
    assert padded.predicting_r.equal(batch.predicting_r) and padded.targets_r.equal(batch.targets_r)
    assert padded.experts_plk is not None and padded.experts_plk.shape == (8, 2, 3)
    assert (padded.experts_plk[7] == -1).all()
    assert batch.padded(7) is batch


def with_gaps() -> MicroBatch:
    """Responses of 7 and 5 tokens, of which four and two were sampled, and a plain answer."""
    turns = (Turn(0, 2), Turn(4, 6)), (Turn(3, 4), Turn(4, 5))
    samples = [sample(2, 7, turns=turns[0]), sample(3, 2), sample(1, 5, turns=turns[1])]
    return MicroBatch.pack(samples, [0, 1, 2])


def test_only_the_tokens_of_turns_are_scored() -> None:
    batch = with_gaps()
    assert (batch.lengths, batch.sampled_lengths) == ((9, 5, 6), (4, 2, 2))
    assert batch.targets_r.tolist() == [2, 3, 6, 7, 3, 4, 4, 5]
    assert batch.predicting_r.tolist() == [1, 2, 5, 6, 11, 12, 17, 18]
    padded = batch.padded(8)
    assert padded.predicting_r.equal(batch.predicting_r) and padded.sampled_lengths == (4, 2, 2, 0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_that_share_a_micro_batch_score_each_sampled_token_once(ranks: int) -> None:
    batch, device = with_gaps(), torch.device("cpu")
    shares = [SequenceGroup(rank, ranks).tokens(batch, device) for rank in range(ranks)]
    assert torch.cat([share.targets_r for share in shares]).equal(batch.targets_r)
    before_r = torch.cat([share.tokens_t[share.positions_r] for share in shares])
    assert before_r.equal(batch.tokens_p[batch.predicting_r])
    assert all(sum(share.counts) == 8 for share in shares)


def test_padding_of_padding_is_padding() -> None:
    padded = MicroBatch.pack([], []).padded(4)
    assert padded.lengths == (1, 3) and len(padded.tokens_p) == 4 and len(padded.predicting_r) == 0

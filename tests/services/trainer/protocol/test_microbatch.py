"""Packing samples: what is told of each token stays beside it."""

import numpy as np

from services.trainer.protocol.microbatch import MicroBatch, Sample


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


def test_padding_of_padding_is_padding() -> None:
    padded = MicroBatch.pack([], []).padded(4)
    assert padded.lengths == (1, 3) and len(padded.tokens_p) == 4 and len(padded.predicting_r) == 0

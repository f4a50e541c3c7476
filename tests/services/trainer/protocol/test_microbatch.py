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

"""Parts of the backend on their own: the scoring head, and packing for context parallelism."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.services.trainer.backends.megatron.batch import packed

Ranks = Callable[[int], tuple[Any, Path]]

pytestmark = pytest.mark.timeout(700)
"""The first test of each number of ranks waits for their launch."""


def test_scores_are_exact_and_the_logits_never_whole(ranks: Ranks) -> None:
    told = ranks(1)[0]["head"]
    assert all(difference < 1e-5 for difference in told["differences"]), told["differences"]
    assert told["largest"] <= told["allowed"] < told["whole"] / 10


def test_two_context_parallel_ranks_have_all_tokens_and_equal_shares(ranks: Ranks) -> None:
    told = ranks(1)[0]["context_parallel_packing"]
    assert told["predicting"] and told["targets"]
    assert told["gaps"]["predicting"] and told["gaps"]["targets"]
    assert sum(told["gaps"]["counts"][0]) == told["gaps"]["sampled"] < told["sampled"]
    assert told["tokens"][0] == told["tokens"][1]
    assert all(length % 4 == 0 for length in told["padded_lengths"])
    whole = packed([0, 1, 2, 3, 4])
    assert all(0 <= padded - length < 4 for padded, length in zip(told["padded_lengths"], whole.lengths, strict=False))
    assert sum(told["counts"][0]) == sum(whole.sampled_lengths)


def test_padding_has_no_scores_of_further_tokens() -> None:
    """A stage joins the scores of its micro-batches also where one of them is padding, in a job with a teacher."""
    from services.trainer.backends.megatron.schedule import joined  # above, it would take each worker of pytest seconds

    real, padding = torch.arange(12.0).view(4, 3), torch.zeros(2, 0)
    assert torch.equal(joined([real, padding], 4), real)
    assert joined([padding, padding], 2).shape == (2, 0)

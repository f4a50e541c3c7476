"""The tokens that the measurements train on."""

import numpy as np
import torch
from torch import Tensor

from services.trainer.backends import TokenScores
from services.trainer.microbatch import MicroBatch

ROWS = 16
TEMPERATURE = 0.7
CLIP_NORM = 1.0
OPTIMIZER = {"lr": 2e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-3}
"""With Adam's usual eps a gradient that is rounding error would move a weight as far as any other."""


def tokens_of(row: int, vocabulary: int, longest: int) -> tuple[np.ndarray, int]:
    """Tokens of one of the compared sequences, and how many of them are the prompt."""
    random = np.random.default_rng(row)
    length = int(random.integers(longest // 16, longest))
    return random.integers(3, vocabulary, length), length // 4


def weights_of(row: int, responses: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(1000 + row).normal(size=responses)).float()


def loss_of(logprobs_r: Tensor, entropy_r: Tensor, rows: tuple[int, ...], lengths: tuple[int, ...]) -> Tensor:
    """A sum over tokens, so that a batch's loss is the sum of its parts' losses."""
    weights_r = torch.cat([weights_of(row, count) for row, count in zip(rows, lengths, strict=True)])
    return 0.01 * (logprobs_r * weights_r.to(logprobs_r.device)).sum() + 0.001 * entropy_r.sum()


def loss_fn(batch: MicroBatch, scores: TokenScores) -> tuple[Tensor, float]:
    assert scores.entropy_r is not None
    loss = loss_of(scores.logprobs_r, scores.entropy_r, batch.rows, batch.response_lengths)
    return loss, float(loss.detach())


def compared(rank: int, size: int, vocabulary: int, longest: int) -> list[MicroBatch]:
    """This data-parallel rank's share of sixteen sequences of mixed lengths, in four micro-batches."""
    mine = list(range(rank, ROWS, size))
    each = len(mine) // 4
    return [_packed(mine[i * each : (i + 1) * each], vocabulary, longest) for i in range(4)]


def _packed(rows: list[int], vocabulary: int, longest: int) -> MicroBatch:
    chosen = [tokens_of(row, vocabulary, longest) for row in rows]
    lengths = tuple(len(tokens) for tokens, _ in chosen)
    responses = tuple(len(tokens) - prompt for tokens, prompt in chosen)
    tokens_p = torch.from_numpy(np.concatenate([tokens for tokens, _ in chosen]).astype(np.int64))
    return MicroBatch(tuple(rows), lengths, responses, tokens_p)


def even(microbatches: int, sequences: int, length: int, vocabulary: int) -> list[MicroBatch]:
    """Micro-batches of equal sequences, a quarter of each the prompt."""
    random = np.random.default_rng(0)
    return [
        MicroBatch(
            tuple(range(sequences)),
            (length,) * sequences,
            (length - length // 4,) * sequences,
            torch.from_numpy(random.integers(3, vocabulary, sequences * length)),
        )
        for _ in range(microbatches)
    ]


def plain_loss(batch: MicroBatch, scores: TokenScores) -> tuple[Tensor, None]:
    return -scores.logprobs_r.sum() / 1e5, None

"""The tokens that the measurements train on."""

import numpy as np
import torch
from torch import Tensor

from millrace.megatron.architectures.shape import ModelShape
from services.trainer.protocol.backend import TokenScores
from services.trainer.protocol.microbatch import MicroBatch

ROWS = 16
TEMPERATURE = 0.7
CLIP_NORM = 1.0
OPTIMIZER = {"lr": 2e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-3}
"""The eps is large: with Adam's usual one a gradient that is a rounding error would move a weight as far as any
other."""


def tokens_of(row: int, vocabulary: int, longest: int) -> tuple[np.ndarray, int]:
    """Tokens of one of the compared sequences, and the number of tokens of its prompt."""
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
    loss = loss_of(scores.logprobs_r, scores.entropy_r, batch.rows, batch.sampled_lengths)
    return loss, float(loss.detach())


def experts_of(tokens: int, layers: int, experts: int, per_token: int, seed: int) -> Tensor:
    """int64 [tokens, layers, per_token]: distinct experts, each as often as any other."""
    random = np.random.default_rng(seed)
    first = random.integers(0, experts, (tokens, layers, 1))
    steps = np.arange(per_token) * (experts // per_token)
    return torch.from_numpy((first + steps) % experts)


def compared(rank: int, size: int, vocabulary: int, longest: int, *, replayed: bool = False) -> list[MicroBatch]:
    """This data-parallel rank's share of sixteen sequences of mixed lengths, in four micro-batches. `replayed`:
    with two of eight experts for each token, in four layers."""
    mine = list(range(rank, ROWS, size))
    each = len(mine) // 4
    return [_packed(mine[i * each : (i + 1) * each], vocabulary, longest, replayed) for i in range(4)]


def _packed(rows: list[int], vocabulary: int, longest: int, replayed: bool) -> MicroBatch:
    chosen = [tokens_of(row, vocabulary, longest) for row in rows]
    lengths = tuple(len(tokens) for tokens, _ in chosen)
    responses = tuple(len(tokens) - prompt for tokens, prompt in chosen)
    tokens_p = torch.from_numpy(np.concatenate([tokens for tokens, _ in chosen]).astype(np.int64))
    experts = [experts_of(length, 4, 8, 2, row) for row, length in zip(rows, lengths, strict=True)]
    return MicroBatch(tuple(rows), lengths, responses, tokens_p, torch.cat(experts).short() if replayed else None)


def even(microbatches: int, sequences: int, length: int, shape: ModelShape) -> list[MicroBatch]:
    """Micro-batches of equal sequences, a quarter of each the prompt; their tokens spread evenly over the experts."""
    random, tokens, experts = np.random.default_rng(0), sequences * length, shape.experts
    chosen = experts_of(tokens, sum(experts.layers), experts.count, experts.per_token, 0).short() if experts else None
    return [
        MicroBatch(
            tuple(range(sequences)),
            (length,) * sequences,
            (length - length // 4,) * sequences,
            torch.from_numpy(random.integers(3, shape.vocabulary, tokens)),
            chosen,
        )
        for _ in range(microbatches)
    ]


def plain_loss(batch: MicroBatch, scores: TokenScores) -> tuple[Tensor, None]:
    return -scores.logprobs_r.sum() / 1e5, None

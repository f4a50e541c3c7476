"""One batch that every rank, topology and implementation trains on, and its loss."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.trainer.protocol.backend import TokenScores
from services.trainer.protocol.microbatch import MicroBatch

TEMPERATURE = 0.7
LEARNING_RATE = 1e-2
CLIP_NORM = 0.5
OPTIMIZER = {"lr": LEARNING_RATE, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-3}
"""The eps is large: with Adam's usual one a gradient that is a rounding error would move a weight as far as any
other."""


@dataclass(frozen=True)
class Trajectory:
    prompt: np.ndarray
    response: np.ndarray


def trajectories() -> list[Trajectory]:
    random = np.random.default_rng(0)
    sizes = zip(random.integers(3, 12, 16), random.integers(2, 20, 16), strict=True)
    return [Trajectory(random.integers(0, 256, p), random.integers(0, 256, r)) for p, r in sizes]


def experts_told(row: int, layers: int = 3, experts: int = 8) -> Tensor:
    """int64 [tokens, layers, 2]: two experts for each token in each layer, and -1 for every fifth token."""
    trajectory, random = trajectories()[row], np.random.default_rng(row)
    tokens = len(trajectory.prompt) + len(trajectory.response)
    chosen = np.stack([random.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)[:, :2] for _ in range(layers)])
    chosen[:, ::5] = -1
    return torch.from_numpy(chosen).transpose(0, 1)


def packed(rows: list[int], *, told: bool = False) -> MicroBatch:
    """`told`: with experts for its tokens."""
    chosen = [trajectories()[row] for row in rows]
    tokens = [part for t in chosen for part in (t.prompt, t.response)]
    lengths = tuple(len(t.prompt) + len(t.response) for t in chosen)
    tokens_p = torch.from_numpy(np.concatenate(tokens).astype(np.int64))
    experts_plk = torch.cat([experts_told(row) for row in rows]) if told else None
    return MicroBatch(tuple(rows), lengths, tuple(len(t.response) for t in chosen), tokens_p, experts_plk)


def microbatches(rank: int, size: int, count: int, *, told: bool = False) -> list[MicroBatch]:
    """This data-parallel rank's share of the batch, in `count` micro-batches."""
    mine = list(range(rank, 16, size))
    each = len(mine) // count
    return [packed(mine[i * each : (i + 1) * each], told=told) for i in range(count)]


def sampled_of(row: int) -> Tensor:
    """Places in the sequence of every token of the response but each third: a trajectory with gaps."""
    trajectory = trajectories()[row]
    return len(trajectory.prompt) + torch.tensor([at for at in range(len(trajectory.response)) if at % 3])


def weights_of(row: int) -> Tensor:
    """What the loss multiplies each response token's log-probability by."""
    return torch.from_numpy(np.random.default_rng(row).normal(size=len(trajectories()[row].response))).float()


def loss_of(logprobs_r: Tensor, entropy_r: Tensor, rows: tuple[int, ...]) -> Tensor:
    """A sum over tokens, so that the batch's loss is the sum of its parts' losses."""
    weights_r = torch.cat([weights_of(row) for row in rows]).to(logprobs_r.device)
    return 0.01 * (logprobs_r * weights_r).sum() + 0.003 * entropy_r.sum()


def loss_fn(batch: MicroBatch, scores: TokenScores) -> tuple[Tensor, float]:
    assert scores.entropy_r is not None
    loss = loss_of(scores.logprobs_r, scores.entropy_r, batch.rows)
    return loss, float(loss.detach())

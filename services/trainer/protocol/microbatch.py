"""A micro-batch: sequences packed one after the other, and which of their tokens are trained."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One trajectory as a rank trains it."""

    label: str
    """Names it to people: `prompt 0-17, sample 3`."""
    prompt: NDArray[np.int32]
    response: NDArray[np.int32]
    rollout_logprobs: NDArray[np.float32]
    """Behaviour log-probability of each response token, nats."""
    reward: float
    reward_parts: tuple[float, ...] = ()
    """Those that the job names in `reward.parts`."""
    greedy_reward: float | None = None
    """Of the greedy answer to the same prompt, where the job asks for one."""
    engine: str = ""
    """That made it."""
    experts: NDArray[np.int16] | None = None
    """[prompt and response tokens, MoE layers, experts a token]: the engine's choices, negative where it told none."""
    versions: NDArray[np.int64] | None = None
    """Of the weights that each response token was sampled with."""


@dataclass(frozen=True)
class MicroBatch:
    """Sequences packed to [P] tokens; [R] of these are responses, in the order of the sequences.

    Without any sequence it stands for a batch of padding: the backend runs one token, so that its collectives meet.
    """

    rows: tuple[int, ...]
    """Which of the rank's samples these are."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, prompt and response."""
    response_lengths: tuple[int, ...]
    tokens_p: Tensor
    """int64 [P]."""
    experts_plk: Tensor | None = None
    """int [P, MoE layers, experts a token]: the engine's choice, negative where it told none of a token, None where it
    told nothing at all: then the trainer's routers choose."""

    @classmethod
    def pack(cls, samples: Sequence[Sample], rows: Sequence[int]) -> "MicroBatch":
        chosen = [samples[row] for row in rows]
        parts = [part for sample in chosen for part in (sample.prompt, sample.response)]
        tokens_p = torch.from_numpy(np.concatenate(parts).astype(np.int64)) if parts else torch.zeros(1).long()
        lengths = tuple(len(sample.prompt) + len(sample.response) for sample in chosen) or (1,)
        return cls(tuple(rows), lengths, tuple(len(sample.response) for sample in chosen), tokens_p, _experts(chosen))

    @cached_property
    def positions_p(self) -> Tensor:
        """int64 [P]: 0, 1, 2, ... anew in each sequence."""
        return torch.cat([torch.arange(length) for length in self.lengths])

    @cached_property
    def starts(self) -> Tensor:
        """int32 [sequences + 1]: where each sequence begins, and the end."""
        return torch.tensor([0, *np.cumsum(self.lengths)], dtype=torch.int32)

    @cached_property
    def predicting_r(self) -> Tensor:
        """int64 [R]: the positions whose logits predict the response tokens, each one before its token."""
        spans = zip(self.starts[1:].tolist(), self.response_lengths, strict=False)
        return torch.cat([torch.arange(end - count - 1, end - 1) for end, count in spans] or [torch.zeros(0).long()])

    @cached_property
    def targets_r(self) -> Tensor:
        """int64 [R]: the response tokens."""
        return self.tokens_p[self.predicting_r + 1]


def _experts(samples: Sequence[Sample]) -> Tensor | None:
    shape = next((sample.experts.shape[1:] for sample in samples if sample.experts is not None), None)
    if shape is None:
        return None
    parts = [
        np.full((len(sample.prompt) + len(sample.response), *shape), -1, np.int16)
        if sample.experts is None
        else sample.experts
        for sample in samples
    ]
    return torch.from_numpy(np.concatenate(parts))

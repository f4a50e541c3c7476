"""A micro-batch: sequences packed one after the other, of which the sampled tokens are trained."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from millrace.wire.arrays import TokenScores as TeacherScores


@dataclass(frozen=True)
class Turn:
    """One answer of the policy within a response: tokens [start, end) of it were sampled."""

    start: int
    end: int
    reward: float = 0.0
    """What the turn itself earned, at its last token."""


@dataclass(frozen=True)
class Sample:
    """One trajectory as a rank trains it."""

    label: str
    """Name for messages to people: `prompt 0-17, sample 3`."""
    prompt: NDArray[np.int32]
    response: NDArray[np.int32]
    """Every token after the prompt, sampled and given."""
    rollout_logprobs: NDArray[np.float32]
    """Behaviour log-probability of each sampled token, nats."""
    reward: float
    """Reward at the last sampled token, in addition to the rewards of turns."""
    reward_parts: tuple[float, ...] = ()
    """The separate rewards that the job names in `reward.parts`."""
    greedy_reward: float | None = None
    """Reward of the greedy answer to the same prompt, if the job asks for one."""
    engine: str = ""
    """Name of the engine that generated this sample."""
    experts: NDArray[np.int16] | None = None
    """The engine's choices, [prompt and response tokens, MoE layers, experts per token]; negative where it reported
    none."""
    versions: NDArray[np.int64] | None = None
    """Version of the weights that each sampled token was sampled with."""
    turns: tuple[Turn, ...] = ()
    """Empty: one turn, which is the whole response."""
    teacher: TeacherScores | None = None
    """The teacher's scores of each sampled token, if the job has a teacher."""
    images: tuple[bytes, ...] = ()
    """Files of the prompt's images, in the order of their places."""

    @property
    def sampled_tokens(self) -> int:
        """Number of response tokens that were sampled."""
        return sum(turn.end - turn.start for turn in self.turns) if self.turns else len(self.response)

    @property
    def sampled_r(self) -> NDArray[np.int64]:
        """Places of the sampled tokens in the whole sequence, int64 [sampled tokens], ascending."""
        first = len(self.prompt)
        if not self.turns:
            return np.arange(first, first + len(self.response))
        return np.concatenate([np.arange(first + turn.start, first + turn.end) for turn in self.turns])


@dataclass(frozen=True)
class MicroBatch:
    """Sequences packed to [P] tokens, of which [R] were sampled, in the order of the sequences.

    A micro-batch without sequences is padding: the backend runs one token, so that all ranks call the same collectives.
    """

    rows: tuple[int, ...]
    """Indices of these sequences among the rank's samples."""
    lengths: tuple[int, ...]
    """Number of tokens of each sequence, prompt and response."""
    sampled_lengths: tuple[int, ...]
    """Number of sampled tokens of each sequence."""
    tokens_p: Tensor
    """Token ids, int64 [P]."""
    experts_plk: Tensor | None = None
    """The engine's choices, int [P, MoE layers, experts per token]. The trainer's routers choose where an entry is
    negative, and for all tokens where this is None."""
    sampled_r: Tensor | None = None
    """Places of the sampled tokens among the [P], int64 [R]. None: they are the last ones of each sequence."""
    others_rk: Tensor | None = None
    """Further tokens to score in the place of each sampled token: the teacher's most likely ones, int64 [R, K]. None:
    there are none."""
    images: tuple[tuple[bytes, ...], ...] = ()
    """Files of the images of each sequence; empty if none has any."""

    @classmethod
    def pack(cls, samples: Sequence[Sample], rows: Sequence[int]) -> "MicroBatch":
        """A micro-batch of the samples with these indices."""
        chosen = [samples[row] for row in rows]
        parts = [part for sample in chosen for part in (sample.prompt, sample.response)]
        tokens_p = torch.from_numpy(np.concatenate(parts).astype(np.int64)) if parts else torch.zeros(1).long()
        lengths = tuple(len(sample.prompt) + len(sample.response) for sample in chosen) or (1,)
        sampled = tuple(sample.sampled_tokens for sample in chosen)
        places = _sampled(chosen, lengths)
        images = tuple(sample.images for sample in chosen)
        shown = images if any(images) else ()
        return cls(tuple(rows), lengths, sampled, tokens_p, _experts(chosen), places, _others(chosen), shown)

    def without_others(self) -> "MicroBatch":
        """The micro-batch of which only the sampled tokens are scored."""
        return self if self.others_rk is None else replace(self, others_rk=None)

    def padded(self, multiple: int) -> "MicroBatch":
        """The micro-batch with as many tokens as a multiple: the added ones are a sequence of which nothing was
        sampled, at the end."""
        missing = -len(self.tokens_p) % multiple
        if not missing:
            return self
        sampled = self.sampled_lengths or (0,) * len(self.lengths)
        chosen = self.experts_plk
        return replace(
            self,
            lengths=(*self.lengths, missing),
            sampled_lengths=(*sampled, 0),
            tokens_p=F.pad(self.tokens_p, (0, missing)),
            experts_plk=None if chosen is None else F.pad(chosen, (0, 0, 0, 0, 0, missing), value=-1),
        )

    @cached_property
    def positions_p(self) -> Tensor:
        """Positions, int64 [P]: 0, 1, 2, ... in each sequence."""
        return torch.cat([torch.arange(length) for length in self.lengths])

    @cached_property
    def starts(self) -> Tensor:
        """The first token of each sequence, and the end, int32 [sequences + 1]."""
        return torch.tensor([0, *np.cumsum(self.lengths)], dtype=torch.int32)

    @cached_property
    def predicting_r(self) -> Tensor:
        """The positions whose logits predict the sampled tokens, each one before its token, int64 [R]."""
        if self.sampled_r is not None:
            return self.sampled_r - 1
        spans = zip(self.starts[1:].tolist(), self.sampled_lengths, strict=False)
        return torch.cat([torch.arange(end - count - 1, end - 1) for end, count in spans] or [torch.zeros(0).long()])

    @cached_property
    def targets_r(self) -> Tensor:
        """Ids of the sampled tokens, int64 [R]."""
        return self.tokens_p[self.predicting_r + 1]


def _sampled(samples: Sequence[Sample], lengths: Sequence[int]) -> Tensor | None:
    """Places of the sampled tokens of packed samples; None if each sample's are its whole response."""
    if not any(sample.turns for sample in samples):
        return None
    starts = np.cumsum([0, *lengths])
    return torch.from_numpy(np.concatenate([start + s.sampled_r for start, s in zip(starts, samples, strict=False)]))


def _others(samples: Sequence[Sample]) -> Tensor | None:
    """The teacher's most likely tokens in the places of all sampled ones; None if it reported none."""
    tops = [sample.teacher.top_tokens_nk for sample in samples if sample.teacher is not None]
    if not tops or not tops[0].shape[1]:
        return None
    return torch.from_numpy(np.concatenate(tops).astype(np.int64))


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

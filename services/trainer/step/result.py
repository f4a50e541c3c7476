"""What a step reports to the coordinator: metrics, histograms, and the groups that people look at."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.contracts.v1.trainer_pb2 import GroupRef, TrainedGroup, TrainedTrajectory
from millrace.telemetry.metrics.histograms import Histogram
from millrace.wire.arrays import pack_floats
from services.trainer.step.batch import RankBatch, stacked
from services.trainer.step.forward_passes import ForwardResults
from services.trainer.step.loss_inputs import Assessment, LossInputs
from services.trainer.step.metrics import mismatch_by_part, step_histograms
from services.trainer.step.schedule import mean_kl
from services.trainer.step.update import UpdateResult


@dataclass(frozen=True)
class StepResult:
    """What a step reports to the coordinator. Every rank has the same."""

    metrics: dict[str, float]
    histograms: dict[str, Histogram]
    shown: list[TrainedGroup]


@dataclass(frozen=True)
class Part:
    """Some groups of a step: what its forward passes computed, and what its losses read."""

    groups: Sequence[GroupRef]
    batch: RankBatch
    scored: ForwardResults
    inputs: LossInputs
    assessment: Assessment


@dataclass(frozen=True)
class StepTokens:
    """The sampled tokens of a whole step, of all ranks: [trajectories, most sampled tokens], in the order of the
    groups."""

    train_bt: Tensor
    """Log-probabilities under the weights that the step began with, as its losses read them."""
    known_bt: Tensor
    """bool: the tokens that have one. All have it where the policy made its own pass; otherwise those that the first
    update trained."""
    rollout_bt: Tensor
    """Log-probabilities that the engine reported."""
    same_bt: Tensor
    """bool: the tokens that were sampled with the weights that the step began with."""
    advantages_bt: Tensor
    mask_bt: Tensor
    engine_b: Tensor
    ref_bt: Tensor | None

    @classmethod
    def of(cls, parts: Sequence[Part], first: UpdateResult, version: int) -> "StepTokens":
        """`first` is the step's first update, `version` that of the weights that the step began with. A collective."""
        known = [_of_first_weights(part, first) for part in parts]
        refs = [part.batch.gather(part.scored.ref_bt) for part in parts if part.scored.ref_bt is not None]
        return cls(
            stacked([part.batch.gather(train_bt) for part, (train_bt, _) in zip(parts, known, strict=True)]),
            stacked([part.batch.gather(mask_bt) for part, (_, mask_bt) in zip(parts, known, strict=True)]),
            stacked([part.batch.gather(part.batch.rollout_bt) for part in parts]),
            stacked([part.batch.gather(part.batch.sampled_with_bt(version)) for part in parts]),
            stacked([part.assessment.advantages_bt for part in parts]),
            stacked([part.assessment.mask_bt for part in parts]),
            torch.cat([part.batch.whole_engine_b for part in parts]),
            stacked(refs) if refs else None,
        )

    def mismatch(self) -> dict[str, float]:
        """How far engine and trainer are apart."""
        return mismatch_by_part(self.train_bt, self.rollout_bt, self.known_bt, self.same_bt, self.engine_b)

    def histograms(self) -> dict[str, Histogram]:
        return step_histograms(self.train_bt, self.rollout_bt, self.known_bt, self.advantages_bt, self.mask_bt)

    def reference_kl(self, estimator: str) -> float | None:
        """Mean KL to the reference; None without a reference."""
        return None if self.ref_bt is None else mean_kl(estimator, self.train_bt, self.ref_bt, self.known_bt)

    def shown(self, parts: Sequence[Part]) -> list[TrainedGroup]:
        """The groups that people look at."""
        groups = [group for part in parts for group in part.groups]
        lengths = [length for part in parts for length in part.batch.division.sampled_lengths]
        return shown_groups(groups, lengths, self.train_bt, self.known_bt, self.advantages_bt)


def _of_first_weights(part: Part, first: UpdateResult) -> tuple[Tensor, Tensor]:
    """A rank's log-probabilities under the weights that the step began with, and the sampled tokens that have one."""
    batch = part.batch
    if part.scored.train_bt is not None:
        return part.scored.train_bt, batch.mask_bt
    if batch not in first.logprobs:
        return torch.zeros_like(batch.rollout_bt), torch.zeros_like(batch.mask_bt)
    return first.logprobs[batch], first.masks[batch]


MOST_TOKENS = 1 << 18
"""Most sampled tokens that a step reports: 2 MiB of log-probabilities and advantages."""


def shown_groups(
    groups: Sequence[GroupRef],
    sampled_lengths: Sequence[int],
    logprobs_bt: Tensor,
    known_bt: Tensor,
    advantages_bt: Tensor,
) -> list[TrainedGroup]:
    """The groups that are `shown`, in order, without those that do not fit into `MOST_TOKENS` beside earlier ones.

    The tensors are those of the whole step, [trajectories, most sampled tokens], and `sampled_lengths` has the sampled
    tokens of each trajectory. A row of `known_bt` is true for all sampled tokens of a trajectory whose
    log-probabilities were computed, and for no token of any other.
    """
    found, room, end = [], MOST_TOKENS, 0
    for group in groups:
        first, end = end, end + (len(group.response_tokens) or len(group.trajectories))
        lengths = sampled_lengths[first:end]
        if not group.shown or sum(lengths) > room:
            continue
        room -= sum(lengths)
        rows = (values_bt[first:end].float().cpu().numpy() for values_bt in (logprobs_bt, known_bt, advantages_bt))
        trajectories = [
            TrainedTrajectory(
                logprobs=pack_floats(logprobs_t[:length]) if known_t[:length].all() else b"",
                advantages=pack_floats(advantages_t[:length]),
            )
            for length, logprobs_t, known_t, advantages_t in zip(lengths, *rows, strict=True)
        ]
        found.append(TrainedGroup(prompt_id=group.prompt_id, trajectories=trajectories))
    return found

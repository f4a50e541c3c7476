"""What leases depend on: the terms of a job, the version in place; and what a member is offered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from millrace.admission.choices import needs_greedy_baseline, teacher_top
from millrace.contracts.trajectories import within
from millrace.contracts.v1 import work_pb2
from millrace.ids import Purpose, Version
from millrace.spec.job import JobSpec
from services.coordinator.state.group import Wanted
from services.coordinator.state.member import Weights


@dataclass(frozen=True)
class LeaseTerms:
    """What is the same for all leases of a job."""

    lease_s: float
    samples: Mapping[Purpose, int]
    """Samples of one prompt."""
    min_samples: int | None = None
    """Samples of a prompt to train on, at least; None: all of them."""
    greedy_baseline: bool = False
    """Whether a prompt to train on also has one greedy answer."""
    temperature: float | None = None
    """Temperature of what is trained; None: any."""
    most_tokens: int | None = None
    """Tokens that a trajectory may have, prompt and response; None: no limit."""
    purposes: Sequence[Purpose] = (Purpose.EVALUATION, Purpose.TRAIN)
    """The purposes for which the job issues prompts, in the order in which they are leased."""
    reward_parts: Sequence[str] = ()
    """Names of the separate rewards that steps report."""
    teacher_top: int | None = None
    """Number of tokens that the teacher reports in each place; None if there is no teacher."""
    stale_parts: bool = False
    """Whether answers with tokens older than `max_staleness` may be trained, so that they are continued."""

    @classmethod
    def of(cls, spec: JobSpec) -> Self:
        evaluation = spec.evaluation.samples_per_prompt if spec.evaluation else 1
        samples = {Purpose.TRAIN: spec.rollout.samples_per_prompt, Purpose.EVALUATION: evaluation}
        purposes = cls.purposes if spec.evaluation else (Purpose.TRAIN,)
        return cls(
            spec.rollout.lease_s,
            samples,
            spec.rollout.min_samples,
            needs_greedy_baseline(spec),
            spec.rollout.temperature,
            spec.data.max_prompt_tokens + spec.rollout.max_response_tokens,
            purposes,
            spec.reward.reported,
            teacher_top(spec),
            spec.schedule.staleness_of != "oldest" or spec.schedule.too_stale == "train",
        )

    def wanted(self, purpose: Purpose) -> Wanted:
        """What the group of a prompt has to be."""
        if purpose is Purpose.TRAIN:
            limits = (self.temperature, self.most_tokens, self.teacher_top)
            return Wanted(self.samples[purpose], self.min_samples, self.greedy_baseline, *limits)
        return Wanted(self.samples[purpose])

    def requests(self, purpose: Purpose) -> int:
        """Number of requests to an engine for one prompt."""
        return self.samples[purpose] + (self.greedy_baseline and purpose is Purpose.TRAIN)


@dataclass(frozen=True)
class RunningJob:
    """The job that runs, as far as leases depend on it."""

    weights: Weights
    """The version that the trainer holds."""
    max_staleness: int
    terms: LeaseTerms
    evaluated: Version | None = None
    """The version whose evaluation is in progress, which may be the one before; None: there is none."""

    def allows(self, held: Weights | None, purpose: Purpose) -> bool:
        """Whether a member that holds `held` may generate for `purpose`."""
        current = self.weights
        if held is None or (held.job_id, held.lineage) != (current.job_id, current.lineage):
            return False
        if purpose is Purpose.EVALUATION:
            return held.version == self.evaluated
        return 0 <= current.version - held.version <= self.max_staleness

    def allows_any(self, held: Weights | None) -> bool:
        """Whether a member that holds `held` may generate at all."""
        return any(self.allows(held, purpose) for purpose in self.terms.purposes)

    def usable(self, parts: Sequence[work_pb2.Part], purpose: Purpose) -> list[work_pb2.Part]:
        """The parts that can still become what is asked for."""
        if purpose is Purpose.EVALUATION:
            return [] if self.evaluated is None else within(parts, self.evaluated, self.evaluated)
        newest = self.weights.version
        return within(parts, 0 if self.terms.stale_parts else newest - self.max_staleness, newest)


@dataclass(frozen=True)
class Offer:
    """What a member can lease."""

    leases: list[work_pb2.Lease]
    idle_reason: str
    """Why there are no leases."""
    exhausted: bool = False
    """Whether there would have been leases had there been a prompt of any purpose."""


EMPTY = Offer([], "the queue is empty", exhausted=True)
BEHIND = Offer([], "other replicas are first")

"""What a simulated job took."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ledger:
    """The number of prompts in each state; `issued` is the sum of the others."""

    issued: int
    trained: int
    in_flight: int
    dropped: int


@dataclass(frozen=True)
class Step:
    """One step, from the publication before it to its own."""

    begin_s: float
    end_s: float
    trainer_s: float
    """Seconds in which the trainer computed or published."""
    replica_s: Sequence[float]
    """The share of its time in the step in which each replica generated."""
    tokens: float
    """Tokens trained, those of prompts included."""
    answers: float
    late: int
    """Groups that came too late to be trained."""
    lost_tokens: float
    """Tokens generated for groups that came too late or were lost with their replica."""
    staleness: Mapping[int, float]
    """Sampled tokens by how many versions they are behind."""
    oldest: Mapping[int, float]
    """Answers by how many versions the oldest token of their group is behind."""
    ledger: Ledger
    """After the step."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Outcome:
    """The steps of a simulated job, without those before it ran evenly."""

    steps: Sequence[Step]

    @property
    def seconds(self) -> float:
        return self.steps[-1].end_s - self.steps[0].begin_s

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self.seconds / len(self.steps)

    @property
    def trainer_idle(self) -> float:
        """Share of the time in which the trainer waits."""
        return max(0.0, 1 - sum(step.trainer_s for step in self.steps) / self.seconds)

    @property
    def replica_idle(self) -> float:
        """Share of the time in which a replica generates nothing, on average."""
        busy = [sum(step.replica_s) / max(1, len(step.replica_s)) * step.seconds for step in self.steps]
        return max(0.0, 1 - sum(busy) / self.seconds)

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens a second, those of prompts included."""
        return sum(step.tokens for step in self.steps) / self.seconds

    @property
    def staleness(self) -> Mapping[int, float]:
        """Trained tokens by how many versions they are behind."""
        found: defaultdict[int, float] = defaultdict(float)
        for step in self.steps:
            for behind, tokens in step.staleness.items():
                found[behind] += tokens
        return dict(sorted(found.items()))

    @property
    def mean_staleness(self) -> float:
        """Versions that a trained token is behind, on average."""
        counts = self.staleness
        return sum(behind * tokens for behind, tokens in counts.items()) / max(1e-9, sum(counts.values()))

    @property
    def max_staleness(self) -> int:
        """Most versions that the oldest token of a trained group was behind."""
        return max((behind for step in self.steps for behind in step.oldest), default=0)

    @property
    def late(self) -> float:
        """Groups of a step that came too late to be trained, on average."""
        return sum(step.late for step in self.steps) / len(self.steps)

    @property
    def lost_share(self) -> float:
        """Share of the generated tokens that is not trained, as their group came too late or their replica was lost."""
        lost = sum(step.lost_tokens for step in self.steps)
        return lost / max(1e-9, lost + sum(sum(step.staleness.values()) for step in self.steps))

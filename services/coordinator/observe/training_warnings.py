"""Finds in a job's step metrics that training goes wrong, and what the cause likely is. Pure.

A job is warned once per episode of trouble: when the trouble has lasted for `Check.steps` steps in a row, and again
only if it comes back after QUIET_STEPS steps without.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from millrace.admission.choices import compares_within_groups
from millrace.drops import TOLERANCE, equal
from millrace.events import TrainingWarning
from millrace.rest import WarningCause
from millrace.spec.job import JobSpec
from millrace.telemetry.metrics.step.batch import GROUPS_WITHOUT_SIGNAL, RESPONSES_CUT, SCORE
from millrace.telemetry.metrics.step.mismatch import K3_KL, K3_KL_SAME_VERSION

QUIET_STEPS = 20
Values = Mapping[str, float]


@dataclass(frozen=True)
class Check:
    """One kind of trouble."""

    cause: WarningCause
    steps: int
    """Steps in a row that the trouble lasts before anybody is warned."""
    metric: str
    """The step metric that shows it."""
    limit: float
    figure: Callable[[Values, JobSpec], float | None]
    """What is compared with the limit; None if the step has no such figure."""
    text: str
    """What the figure says, as a format for `value`."""
    advice: str
    """What follows and the likely cause, without a full stop."""
    above: bool = True
    """Whether there is trouble from the limit upwards, or below it."""

    def holds(self, values: Values, spec: JobSpec) -> bool:
        found = self.figure(values, spec)
        return found is not None and (found >= self.limit if self.above else found < self.limit)


def _spread(values: Values, spec: JobSpec) -> float | None:
    """Largest minus smallest reward of the step: 0 of equal ones."""
    low, high = values.get(f"{SCORE}/min"), values.get(f"{SCORE}/max")
    if low is None or high is None:
        return None
    return 0.0 if equal(low, high) else high - low


def _without_signal(values: Values, spec: JobSpec) -> float | None:
    """Share of the step's groups; None if rewards within groups are not compared, or are equal over all groups."""
    if not compares_within_groups(spec) or (_spread(values, spec) or 0.0) == 0.0:
        return None
    count = values.get(GROUPS_WITHOUT_SIGNAL)
    return count / spec.schedule.prompts_per_step if count is not None else None


def _metric(name: str) -> Callable[[Values, JobSpec], float | None]:
    return lambda values, spec: values.get(name)


def _stale_kl(values: Values, spec: JobSpec) -> float | None:
    return values.get(K3_KL) if K3_KL_SAME_VERSION not in values else None


DISAGREEMENT = (
    "Likely engine and trainer compute differently: another dtype, quantised weights, other attention kernels, or "
    "expert routing that is not replayed"
)
SOLVED = (
    "Every answer earns the most that any has earned: the task is solved, and nothing more is learned. End the job, or "
    "take harder prompts"
)
CHECKS = (
    Check(
        cause=WarningCause.EQUAL_REWARDS,
        steps=3,
        metric=f"{SCORE}/max",
        limit=TOLERANCE,
        above=False,
        figure=_spread,
        text="every reward is {:.4g}",
        advice="Nothing is learned. Likely the reward function does not find the answer in the text or gives every "
        "answer the same, or the model solves every prompt or none",
    ),
    Check(
        cause=WarningCause.NO_SIGNAL,
        steps=5,
        metric=GROUPS_WITHOUT_SIGNAL,
        limit=0.9,
        figure=_without_signal,
        text="in {:.0%} of the groups all rewards are equal",
        advice="Such a group teaches nothing. Likely each prompt is always or never solved: raise "
        "rollout.samples_per_prompt or rollout.temperature, or take prompts of another difficulty",
    ),
    Check(
        cause=WarningCause.LOGPROB_MISMATCH,
        steps=3,
        metric=K3_KL_SAME_VERSION,
        limit=0.01,
        figure=_metric(K3_KL_SAME_VERSION),
        text="the KL divergence of engine and trainer is {:.3g} on tokens of the same version",
        advice=DISAGREEMENT,
    ),
    Check(
        cause=WarningCause.LOGPROB_MISMATCH,
        steps=3,
        metric=K3_KL,
        limit=0.1,
        figure=_stale_kl,
        text="the KL divergence of engine and trainer is {:.3g}",
        advice=f"{DISAGREEMENT}; or the answers are too stale: lower schedule.max_staleness",
    ),
    Check(
        cause=WarningCause.RESPONSES_CUT,
        steps=3,
        metric=RESPONSES_CUT,
        limit=0.95,
        figure=_metric(RESPONSES_CUT),
        text="{:.0%} of the responses are cut at rollout.max_response_tokens",
        advice="Likely that is too small, or the model does not end its answers: look at its chat template and "
        "rollout.stop",
    ),
)
STEPS_LOOKED_AT = QUIET_STEPS + max(check.steps for check in CHECKS)
"""How many rows `found` needs at most."""


def found(rows: Sequence[Values], spec: JobSpec) -> list[tuple[TrainingWarning, str]]:
    """The warnings that are due after the last of `rows`, each with its message. `rows` are the metrics of consecutive
    steps, at most STEPS_LOOKED_AT."""
    due = []
    for check in CHECKS:
        if not _is_due([check.holds(values, spec) for values in rows], check.steps):
            continue
        value = check.figure(rows[-1], spec) if check.above else rows[-1][check.metric]
        assert value is not None
        warning = TrainingWarning(
            cause=check.cause, metric=check.metric, value=value, limit=check.limit, steps=check.steps
        )
        solved = check.cause is WarningCause.EQUAL_REWARDS and _is_solved(rows)
        advice = SOLVED if solved else check.advice
        due.append((warning, f"{check.text.format(value)} for {check.steps} steps. {advice}."))
    return due


def _is_solved(rows: Sequence[Values]) -> bool:
    """Whether every answer now earns the most that any answer of these steps earned, and some earned less before."""
    rewards = [(row[f"{SCORE}/min"], row[f"{SCORE}/max"]) for row in rows if f"{SCORE}/max" in row]
    now = rewards[-1][1]
    return now >= max(high for _, high in rewards) and min(low for low, _ in rewards) < now - TOLERANCE


def lasting(values: Values, spec: JobSpec) -> set[WarningCause]:
    """The kinds of trouble that the step with these metrics has."""
    return {check.cause for check in CHECKS if check.holds(values, spec)}


def _is_due(held: Sequence[bool], steps: int) -> bool:
    """Whether trouble has just lasted for `steps` steps, for the first time in a while. `held` is by step."""
    begun = [all(held[end - steps : end]) for end in range(steps, len(held) + 1)]
    return bool(begun) and begun[-1] and not any(begun[:-1])

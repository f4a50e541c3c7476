"""Rewards on held-out prompts, by data source. `reward` is the score of the job's reward function."""

from millrace.telemetry.metrics.declaration import Owner, StepMetric, Unit

COORDINATOR = Owner.COORDINATOR

EVALUATION_RESULTS = (
    StepMetric(
        "val-core/{data_source}/reward/mean@{n}", Unit.REWARD, COORDINATOR, "Mean reward of the n answers to a prompt."
    ),
    StepMetric(
        "val-core/{data_source}/reward/best@{k}/mean",
        Unit.REWARD,
        COORDINATOR,
        "Expected best reward among all n answers (k = n); for rewards of 0 and 1 it is pass@n.",
    ),
)
"""The metrics that a job's report shows for each evaluation."""

EVALUATION = (
    *EVALUATION_RESULTS,
    StepMetric(
        "val-aux/{data_source}/reward/best@{k}/mean",
        Unit.REWARD,
        COORDINATOR,
        "Expected best reward among k different answers, for the powers of 2 below n; for rewards of 0 and 1 it is"
        " pass@k (arXiv 2107.03374).",
    ),
    StepMetric(
        "val-aux/{data_source}/reward/worst@{k}/mean",
        Unit.REWARD,
        COORDINATOR,
        "Expected worst reward among k different answers.",
    ),
    StepMetric("val-aux/scored_prompts", Unit.COUNT, COORDINATOR, "Held-out prompts that were scored."),
)

"""Answers to held-out prompts, by data source. If the reward function gives every answer an `acc`, `val-core` has
that and `val-aux` the reward, as in verl."""

from millrace.telemetry.metrics.declaration import Unit, by_coordinator

_MEAN = "Mean of the n answers to a prompt, then over the prompts."
_BEST = "Expected best among k different answers; of rewards of 0 and 1 it is pass@k (arXiv 2107.03374)."
_MAJORITY = (
    "Value of the answer with the most frequent `pred` among k answers: mean of 1000 draws with replacement, as in"
    " verl, if the reward function gives every answer a `pred`."
)

SCORED_PROMPTS = "val-aux/scored_prompts"
ASKED_PROMPTS = "val-aux/asked_prompts"

EVALUATION_RESULTS = (
    by_coordinator("val-core/{data_source}/{variable}/mean@{n}", Unit.REWARD, _MEAN),
    by_coordinator("val-core/{data_source}/{variable}/best@{k}/mean", Unit.REWARD, f"{_BEST} Here k = n."),
    by_coordinator("val-core/{data_source}/{variable}/maj@{k}/mean", Unit.REWARD, f"{_MAJORITY} Here k = n."),
)
"""The metrics that a job's report shows for each evaluation."""

EVALUATION = (
    *EVALUATION_RESULTS,
    by_coordinator(
        "val-core/{data_source}/{variable}/maj@{k}/std",
        Unit.REWARD,
        "Standard deviation over those draws, then the mean over the prompts. Here k = n.",
    ),
    by_coordinator("val-aux/{data_source}/{variable}/mean@{n}", Unit.REWARD, _MEAN),
    by_coordinator(
        "val-aux/{data_source}/{variable}/std@{n}",
        Unit.REWARD,
        "Standard deviation of the n answers to a prompt (divisor n), then the mean over the prompts.",
    ),
    by_coordinator(
        "val-aux/{data_source}/{variable}/best@{k}/mean",
        Unit.REWARD,
        f"{_BEST} For the powers of 2 below n, and n if the variable is not that of `val-core`.",
    ),
    by_coordinator(
        "val-aux/{data_source}/{variable}/worst@{k}/mean", Unit.REWARD, "Expected worst among k different answers."
    ),
    by_coordinator("val-aux/{data_source}/{variable}/maj@{k}/mean", Unit.REWARD, _MAJORITY),
    by_coordinator(
        "val-aux/{data_source}/{variable}/maj@{k}/std",
        Unit.REWARD,
        "Standard deviation over those draws, then the mean over the prompts.",
    ),
    by_coordinator(
        "evaluation/held_out",
        Unit.REWARD,
        "Held-out score, as `millrace jobs` shows it: mean over all answers of the variable that `val-core` "
        "has of their data source. With one data source it is that `mean@n`.",
    ),
    by_coordinator(SCORED_PROMPTS, Unit.COUNT, "Held-out prompts that were scored."),
    by_coordinator(ASKED_PROMPTS, Unit.COUNT, "Held-out prompts of the evaluation. Those that failed have no score."),
)

"""How far the engine's log-probabilities are from the trainer's, and what a correction does about it.

w = π_train/π_rollout is the ratio of a token's probabilities by trainer and engine. Means are over tokens, except if
the meaning says otherwise.
"""

from millrace.telemetry.metrics.declaration import Owner, StepMetric, Unit

TRAINER = Owner.TRAINER

K3_KL = "rollout_corr/k3_kl"
K3_KL_SAME_VERSION = f"{K3_KL}/same_version"
SPLIT = ("training/rollout_probs_diff_mean", "rollout_corr/kl", K3_KL)
"""Keys whose metric is also reported for parts of the batch: see `MISMATCH_SUMMARY`."""


def _parts_of(key: str, unit: Unit, meaning: str) -> tuple[StepMetric, ...]:
    same = "over tokens that were sampled with exactly the weights that the trainer compares with"
    one = "over what one engine generated, if the batch is from several engines"
    return (
        StepMetric(key, unit, TRAINER, f"{meaning}."),
        StepMetric(f"{key}/same_version", unit, TRAINER, f"The same {same}."),
        StepMetric(f"{key}/{{engine}}", unit, TRAINER, f"The same {one}."),
        StepMetric(f"{key}/same_version/{{engine}}", unit, TRAINER, f"The same {same}, and {one}."),
    )


MISMATCH_SUMMARY = (
    *_parts_of(SPLIT[0], Unit.PROBABILITY, "Mean of |π_train − π_rollout|"),
    *_parts_of(SPLIT[1], Unit.NATS, "Estimate k1 of KL(rollout‖train): mean of −log w"),
    *_parts_of(SPLIT[2], Unit.NATS, "Estimate k3 of KL(rollout‖train): mean of w − 1 − log w"),
)
"""The metrics that a job's report shows."""

MISMATCH = (
    *MISMATCH_SUMMARY,
    StepMetric("training/rollout_probs_diff_max", Unit.PROBABILITY, TRAINER, "Largest |π_train − π_rollout|."),
    StepMetric(
        "training/rollout_probs_diff_std",
        Unit.PROBABILITY,
        TRAINER,
        "Standard deviation of |π_train − π_rollout|.",
    ),
    StepMetric("training/rollout_logprobs_diff_max", Unit.NATS, TRAINER, "Largest |log w|."),
    StepMetric("rollout_corr/chi2_token", Unit.RATIO, TRAINER, "Mean of w² − 1; 0 for equal policies."),
    StepMetric(
        "rollout_corr/chi2_seq", Unit.RATIO, TRAINER, "Mean over responses of (Π w)² − 1; 0 for equal policies."
    ),
    StepMetric("rollout_corr/training_ppl", Unit.PERPLEXITY, TRAINER, "Mean perplexity of a response, by the trainer."),
    StepMetric(
        "rollout_corr/training_log_ppl", Unit.NATS, TRAINER, "Mean log-perplexity of a response, by the trainer."
    ),
    StepMetric("rollout_corr/rollout_ppl", Unit.PERPLEXITY, TRAINER, "Mean perplexity of a response, by the engine."),
    StepMetric("rollout_corr/rollout_log_ppl", Unit.NATS, TRAINER, "Mean log-perplexity of a response, by the engine."),
    StepMetric(
        "rollout_corr/log_ppl_diff", Unit.NATS, TRAINER, "Log-perplexity by the trainer less that by the engine: mean."
    ),
    StepMetric("rollout_corr/log_ppl_abs_diff", Unit.NATS, TRAINER, "Mean of the absolute difference."),
    StepMetric("rollout_corr/log_ppl_diff_max", Unit.NATS, TRAINER, "Largest difference."),
    StepMetric("rollout_corr/log_ppl_diff_min", Unit.NATS, TRAINER, "Smallest difference."),
    StepMetric(
        "rollout_corr/ppl_ratio", Unit.RATIO, TRAINER, "Mean of perplexity by the trainer over that by the engine."
    ),
    StepMetric("rollout_corr/rollout_is_mean", Unit.RATIO, TRAINER, "Mean of the correction's weights over tokens."),
    StepMetric("rollout_corr/rollout_is_std", Unit.RATIO, TRAINER, "Standard deviation of the weights; 0 if equal."),
    StepMetric(
        "rollout_corr/rollout_is_max",
        Unit.RATIO,
        TRAINER,
        "Largest weight of a token. For weights by response: the largest ratio of a response, before it is truncated.",
    ),
    StepMetric(
        "rollout_corr/rollout_is_min",
        Unit.RATIO,
        TRAINER,
        "Smallest weight of a token. For weights by response: the smallest ratio of a response.",
    ),
    StepMetric(
        "rollout_corr/rollout_is_eff_sample_size",
        Unit.SHARE,
        TRAINER,
        "Effective sample size over the number of tokens: (mean weight)² / mean of the squared weights.",
    ),
    StepMetric("rollout_corr/rollout_is_seq_mean", Unit.RATIO, TRAINER, "Mean of the responses' mean weights."),
    StepMetric("rollout_corr/rollout_is_seq_max", Unit.RATIO, TRAINER, "Largest mean weight of a response."),
    StepMetric("rollout_corr/rollout_is_seq_min", Unit.RATIO, TRAINER, "Smallest mean weight of a response."),
    StepMetric(
        "rollout_corr/rollout_is_ratio_fraction_high",
        Unit.SHARE,
        TRAINER,
        "Tokens whose ratio is above the correction's upper bound; for weights by response, responses.",
    ),
    StepMetric(
        "rollout_corr/rollout_is_ratio_fraction_low",
        Unit.SHARE,
        TRAINER,
        "Tokens whose ratio is below the correction's lower bound, or 1/`cap`; for weights by response, responses.",
    ),
    StepMetric(
        "rollout_corr/rollout_is_oob_ratio",
        Unit.SHARE,
        TRAINER,
        "Tokens whose ratio is out of bounds (`icepop`, `icepop_sequence`).",
    ),
    StepMetric("rollout_corr/rollout_rs_masked_fraction", Unit.SHARE, TRAINER, "Tokens that were rejected."),
    StepMetric(
        "rollout_corr/rollout_rs_seq_masked_fraction",
        Unit.SHARE,
        TRAINER,
        "Responses of which at least one token was rejected.",
    ),
    StepMetric(
        "rollout_corr/rollout_rs_{criterion}_masked_fraction",
        Unit.SHARE,
        TRAINER,
        "Tokens that this rejection alone rejects.",
    ),
    StepMetric(
        "rollout_corr/rollout_rs_{criterion}_seq_masked_fraction",
        Unit.SHARE,
        TRAINER,
        "Responses of which this rejection alone rejects a token.",
    ),
    StepMetric(
        "rollout_corr/rollout_is_batch_norm_factor",
        Unit.RATIO,
        TRAINER,
        "Mean of the weights, by which they are divided (`algorithm.normalize_correction_weights`).",
    ),
    StepMetric(
        "rollout_corr/{name}",
        Unit.REPORTED,
        TRAINER,
        "Mean of what a user's own correction reports for each token.",
        user_defined=True,
    ),
)

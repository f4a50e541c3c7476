"""How far the engine's log-probabilities are from the trainer's, and what a correction does about it.

w = π_train/π_rollout is the ratio of a token's probabilities by trainer and engine. Means are over tokens, except if
the meaning says otherwise.
"""

from millrace.telemetry.metrics.declaration import StepMetric, Unit, by_trainer

K3_KL = "rollout_corr/k3_kl"
K3_KL_SAME_VERSION = f"{K3_KL}/same_version"
SPLIT = ("training/rollout_probs_diff_mean", "rollout_corr/kl", K3_KL)
"""Keys whose metric is also reported for parts of the batch: see `MISMATCH_SUMMARY`."""


def _parts_of(key: str, unit: Unit, meaning: str) -> tuple[StepMetric, ...]:
    same = "over tokens that were sampled with exactly the weights that the trainer compares with"
    one = "over what one engine generated, if the batch is from several engines"
    return (
        by_trainer(key, unit, f"{meaning}."),
        by_trainer(f"{key}/same_version", unit, f"The same {same}."),
        by_trainer(f"{key}/{{engine}}", unit, f"The same {one}."),
        by_trainer(f"{key}/same_version/{{engine}}", unit, f"The same {same}, and {one}."),
    )


MISMATCH_SUMMARY = (
    *_parts_of(SPLIT[0], Unit.PROBABILITY, "Mean of |π_train − π_rollout|"),
    *_parts_of(SPLIT[1], Unit.NATS, "Estimate k1 of KL(rollout‖train): mean of −log w"),
    *_parts_of(SPLIT[2], Unit.NATS, "Estimate k3 of KL(rollout‖train): mean of w − 1 − log w"),
)
"""The metrics that a job's report shows."""

MISMATCH = (
    *MISMATCH_SUMMARY,
    by_trainer("training/rollout_probs_diff_max", Unit.PROBABILITY, "Largest |π_train − π_rollout|."),
    by_trainer("training/rollout_probs_diff_std", Unit.PROBABILITY, "Standard deviation of |π_train − π_rollout|."),
    by_trainer("training/rollout_logprobs_diff_max", Unit.NATS, "Largest |log w|."),
    by_trainer("rollout_corr/chi2_token", Unit.RATIO, "Mean of w² − 1; 0 for equal policies."),
    by_trainer("rollout_corr/chi2_seq", Unit.RATIO, "Mean over responses of (Π w)² − 1; 0 for equal policies."),
    by_trainer("rollout_corr/training_ppl", Unit.PERPLEXITY, "Mean perplexity of a response, by the trainer."),
    by_trainer("rollout_corr/training_log_ppl", Unit.NATS, "Mean log-perplexity of a response, by the trainer."),
    by_trainer("rollout_corr/rollout_ppl", Unit.PERPLEXITY, "Mean perplexity of a response, by the engine."),
    by_trainer("rollout_corr/rollout_log_ppl", Unit.NATS, "Mean log-perplexity of a response, by the engine."),
    by_trainer("rollout_corr/log_ppl_diff", Unit.NATS, "Log-perplexity by the trainer less that by the engine: mean."),
    by_trainer("rollout_corr/log_ppl_abs_diff", Unit.NATS, "Mean of the absolute difference."),
    by_trainer("rollout_corr/log_ppl_diff_max", Unit.NATS, "Largest difference."),
    by_trainer("rollout_corr/log_ppl_diff_min", Unit.NATS, "Smallest difference."),
    by_trainer("rollout_corr/ppl_ratio", Unit.RATIO, "Mean of perplexity by the trainer over that by the engine."),
    by_trainer("rollout_corr/rollout_is_mean", Unit.RATIO, "Mean of the correction's weights over tokens."),
    by_trainer("rollout_corr/rollout_is_std", Unit.RATIO, "Standard deviation of the weights; 0 if equal."),
    by_trainer(
        "rollout_corr/rollout_is_max",
        Unit.RATIO,
        "Largest weight of a token. For weights by response: the largest ratio of a response, before it is truncated.",
    ),
    by_trainer(
        "rollout_corr/rollout_is_min",
        Unit.RATIO,
        "Smallest weight of a token. For weights by response: the smallest ratio of a response.",
    ),
    by_trainer(
        "rollout_corr/rollout_is_eff_sample_size",
        Unit.SHARE,
        "Effective sample size over the number of tokens: (mean weight)² / mean of the squared weights.",
    ),
    by_trainer("rollout_corr/rollout_is_seq_mean", Unit.RATIO, "Mean of the responses' mean weights."),
    by_trainer("rollout_corr/rollout_is_seq_max", Unit.RATIO, "Largest mean weight of a response."),
    by_trainer("rollout_corr/rollout_is_seq_min", Unit.RATIO, "Smallest mean weight of a response."),
    by_trainer(
        "rollout_corr/rollout_is_ratio_fraction_high",
        Unit.SHARE,
        "Tokens whose ratio is above the correction's upper bound; for weights by response, responses.",
    ),
    by_trainer(
        "rollout_corr/rollout_is_ratio_fraction_low",
        Unit.SHARE,
        "Tokens whose ratio is below the correction's lower bound, or 1/`cap`; for weights by response, responses.",
    ),
    by_trainer(
        "rollout_corr/rollout_is_oob_ratio",
        Unit.SHARE,
        "Tokens whose ratio is out of bounds (`icepop`, `icepop_sequence`).",
    ),
    by_trainer("rollout_corr/rollout_rs_masked_fraction", Unit.SHARE, "Tokens that were rejected."),
    by_trainer(
        "rollout_corr/rollout_rs_seq_masked_fraction", Unit.SHARE, "Responses of which at least one token was rejected."
    ),
    by_trainer(
        "rollout_corr/rollout_rs_{criterion}_masked_fraction", Unit.SHARE, "Tokens that this rejection alone rejects."
    ),
    by_trainer(
        "rollout_corr/rollout_rs_{criterion}_seq_masked_fraction",
        Unit.SHARE,
        "Responses of which this rejection alone rejects a token.",
    ),
    by_trainer(
        "rollout_corr/rollout_is_batch_norm_factor",
        Unit.RATIO,
        "Mean of the weights, by which they are divided (`algorithm.normalize_correction_weights`).",
    ),
    by_trainer(
        "rollout_corr/{name}",
        Unit.REPORTED,
        "Mean of what a user's own correction reports for each token.",
        user_defined=True,
    ),
)

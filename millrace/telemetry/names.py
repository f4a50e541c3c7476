"""Names of metrics that more than one service knows."""

MISMATCH = ("training/rollout_probs_diff_mean", "rollout_corr/kl", "rollout_corr/k3_kl")
"""How far the engine's probabilities are from the trainer's. Also of those tokens alone that were sampled with the
weights that the trainer compares with, `<name>/same_version`, and of each engine of several, `<name>/<engine>`."""

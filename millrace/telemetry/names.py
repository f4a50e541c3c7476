"""Names of metrics that more than one service knows."""

MISMATCH = ("training/rollout_probs_diff_mean", "rollout_corr/kl", "rollout_corr/k3_kl")
"""How far the engine's probabilities are from the trainer's. With several engines in a job, each also by itself:
`<name>/<engine>`."""

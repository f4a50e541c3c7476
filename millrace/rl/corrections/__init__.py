"""Corrections of the mismatch between the engine's log-probabilities and the trainer's. Each family is one file.

A correction returns `(weights_bt, keep_bt, metrics_bt)`: bounded importance weights π_train/π_rollout (None means that
all are 1), the tokens that stay in the loss, and metrics by name. A metric of each token, [B, T], is averaged over the
tokens, a metric of each sequence, [B], over the sequences. Weights never carry a gradient. Weights of whole sequences
are [B, 1].
"""

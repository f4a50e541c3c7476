"""Losses that bring the policy nearer to a teacher, on the tokens that the policy sampled. Each loss is one file.

A loss returns `(loss_bt, metrics_bt)` as a policy loss does: the loss of each token and the metrics of each token. Both
are aggregated here. What a loss gets is 0 where the mask is false.
"""

"""Policy losses. Each loss, or family of losses, is one file.

A loss returns `(loss_bt, metrics_bt)`: the loss of each token and the metrics of each token by name, for example 1.0
where the token was clipped. Both are aggregated here, so that a loss is exact over micro-batches and ranks without
knowing about them. The tensors that a loss gets are 0 where the mask is false.
"""

"""Direct reward optimization (arXiv 2405.19107): −A·log π + (beta/2)·(log π/π_old)².

The quadratic term takes the place of ratio and clipping: the gradient of log π is −A + beta·log(π/π_old). The paper
squares the log-ratio of a whole answer and learns a value for A; this is the form of verl and Tinker, with a square for
each token and the advantage of any estimator.
"""

from torch import Tensor

from millrace.rl.registry.options import Positive


def dro(
    *, logprobs_bt: Tensor, old_logprobs_bt: Tensor, advantages_bt: Tensor, beta: Positive = 0.1
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient with a quadratic penalty on the log-ratio."""
    penalty_bt = beta / 2 * (logprobs_bt - old_logprobs_bt).square()
    return -advantages_bt * logprobs_bt + penalty_bt, {"quadratic_penalty": penalty_bt}

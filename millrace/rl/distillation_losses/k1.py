"""The reverse KL to the teacher as a policy gradient: on-policy distillation with the estimate k1.

Differentiated as it stands, log π − log p has a gradient whose expectation is 0. As a cost of the sampled token, in the
place of an advantage, it gives the gradient of KL(π‖p) in each place (arXiv 2306.08543).
"""

from torch import Tensor

from millrace.rl.formulas.ratios import log_ratio
from millrace.rl.registry.options import Positive


def k1(
    *,
    logprobs_bt: Tensor,
    old_logprobs_bt: Tensor,
    teacher_logprobs_bt: Tensor,
    weights_bt: Tensor | None = None,
    cap: Positive | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """ρ·sg(log π − log p), with ρ = π/π_old and p the teacher; times the weights of a correction. `cap` limits the size
    of log π − log p of a token."""
    cost_bt = (logprobs_bt - teacher_logprobs_bt).detach()
    metrics_bt: dict[str, Tensor] = {}
    if cap is not None:
        metrics_bt["cap_fraction"] = cost_bt.abs() > cap
        cost_bt = cost_bt.clamp(-cap, cap)
    loss_bt = log_ratio(logprobs_bt, old_logprobs_bt).exp() * cost_bt
    return loss_bt if weights_bt is None else loss_bt * weights_bt, metrics_bt

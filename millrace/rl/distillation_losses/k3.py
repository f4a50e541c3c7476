"""The estimate k3 of the KL to the teacher, differentiated as it stands (http://joschu.net/blog/kl-approx.html), on
the student's own samples (arXiv 2306.13649)."""

from torch import Tensor

from millrace.rl.formulas.divergence import kl


def k3(*, logprobs_bt: Tensor, teacher_logprobs_bt: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """p/π − log p/π − 1 of the sampled token, p the teacher. Its value estimates KL(π‖p), never negative; its gradient
    is in expectation that of KL(p‖π)."""
    return kl("k3", logprobs_bt, teacher_logprobs_bt), {}

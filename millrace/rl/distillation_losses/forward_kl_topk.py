"""The forward KL over the tokens that the teacher thinks most likely: exact in each place, without sampling noise.

On the policy's own samples, as in generalised knowledge distillation (arXiv 2306.13649).
"""

from torch import Tensor

SMALLEST_REST = 1e-6
"""Probabilities of the remaining tokens below this are not distinguished: they are differences of numbers near 1."""


def forward_kl_topk(
    *, top_logprobs_btk: Tensor, teacher_top_logprobs_btk: Tensor, rest: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Σ p·log(p/π) over the teacher's K most likely tokens; with `rest` all other tokens are one more outcome, so that
    the loss is a KL: never negative, and 0 where the policy agrees with the teacher."""
    teacher_btk = teacher_top_logprobs_btk.exp()
    loss_bt = (teacher_btk * (teacher_top_logprobs_btk - top_logprobs_btk)).sum(-1)
    teacher_mass_bt, student_mass_bt = teacher_btk.sum(-1), top_logprobs_btk.exp().sum(-1)
    if rest:
        teacher_rest_bt = (1 - teacher_mass_bt).clamp(min=0)
        log_ratio_bt = teacher_rest_bt.clamp(min=SMALLEST_REST).log() - (1 - student_mass_bt).clamp(SMALLEST_REST).log()
        loss_bt = loss_bt + teacher_rest_bt * log_ratio_bt
    return loss_bt, {"teacher_mass": teacher_mass_bt, "student_mass": student_mass_bt.detach()}

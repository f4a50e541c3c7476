"""Pass@k for any k up to the group's size, in expectation over its subsets (arXiv 2508.10751).

For a group of n answers, w of them wrong, R = 1 − C(w, k)/C(n, k) is the mean pass@k of its subsets of k answers and
σ = sqrt(R(1 − R)) their standard deviation. A correct answer gets (1 − R)/σ, a wrong one
(1 − R − C(w−1, k−1)/C(n−1, k−1))/σ, which is the mean over the subsets that contain it. An answer is correct if its
reward is above `threshold`.
"""

import torch
from torch import Tensor

from millrace.rl.formulas.groups import Groups, on_tokens
from millrace.rl.registry.options import Count

SEPARABLE = True


def passk(
    *,
    token_rewards_bt: Tensor,
    mask_bt: Tensor,
    group_b: Tensor,
    k: Count = 4,
    threshold: float = 0.5,
) -> tuple[Tensor, Tensor]:
    """The advantage of pass@k, averaged over all subsets of k answers of a group."""
    groups = Groups.of(group_b, mask_bt)
    rewards_b = token_rewards_bt.sum(dim=-1)
    is_right_b = rewards_b > threshold
    sizes_b = groups.sizes_b.to(rewards_b.dtype)
    wrong_b = groups.sum((~is_right_b).to(rewards_b.dtype))
    solved_b = 1 - _ratio_of_choices(wrong_b, sizes_b, k)
    std_b = (solved_b * (1 - solved_b)).clamp(min=0).sqrt()
    all_wrong_b = torch.where(is_right_b, 0, _ratio_of_choices(wrong_b - 1, sizes_b - 1, k - 1))
    has_signal_b = (sizes_b >= k) & (std_b > 0)
    return on_tokens(torch.where(has_signal_b, (1 - solved_b - all_wrong_b) / std_b, 0), mask_bt)


def _ratio_of_choices(part_b: Tensor, whole_b: Tensor, k: int) -> Tensor:
    """C(part, k) / C(whole, k) as a product of k factors, which cannot overflow; 0 where part < k."""
    ratio_b = torch.ones_like(part_b)
    for i in range(k):
        ratio_b = ratio_b * (part_b - i).clamp(min=0) / (whole_b - i).clamp(min=1)
    return ratio_b

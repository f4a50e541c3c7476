"""A policy gradient that takes longer: a file of its own, as the trainer loads it by its path."""

import time

from torch import Tensor

from millrace.rl.registry.options import NonNegative


def waiting(
    *, logprobs_bt: Tensor, advantages_bt: Tensor, mask_bt: Tensor, token_s: NonNegative = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """−A·log π. The trainer waits `token_s` seconds for each sampled token, as if its model were larger."""
    time.sleep(token_s * float(mask_bt.sum()))
    return -logprobs_bt * advantages_bt, {}

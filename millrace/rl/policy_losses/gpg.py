"""Group policy gradient (arXiv 2504.02546): −A·log π, without ratio or clipping. For the advantage `gpg`."""

from torch import Tensor


def gpg(*, logprobs_bt: Tensor, advantages_bt: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Plain policy gradient."""
    return -advantages_bt * logprobs_bt, {}

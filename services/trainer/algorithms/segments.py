"""Conversion between packed micro-batches, whose sequences follow each other, and the padded tensors of algorithms."""

from collections.abc import Sequence

import torch
from torch import Tensor


def unpack(values_p: Tensor, lengths: Sequence[int]) -> Tensor:
    """[B, max(lengths)] from [sum(lengths)], padded with zeros; gradients flow through.

    Raises ValueError if the lengths do not add up to the number of packed values.
    """
    if sum(lengths) != values_p.shape[0]:
        raise ValueError(f"Lengths add up to {sum(lengths)} but there are {values_p.shape[0]} packed values.")
    return torch.nn.utils.rnn.pad_sequence(list(values_p.split(list(lengths))), batch_first=True)


def pack(values_bt: Tensor, lengths: Sequence[int]) -> Tensor:
    """[sum(lengths)] from [B, T]: the inverse of `unpack`."""
    return torch.cat([row[:length] for row, length in zip(values_bt, lengths, strict=True)])

"""Tokens of a batch: which have no policy loss, packed and padded, and checked to be finite."""

from collections.abc import Sequence

import torch
from torch import Tensor

from millrace.errors import NonFinite
from millrace.rl.formulas.ratios import sequence_mean

ROUNDING = 1e-9


@torch.no_grad()
def high_entropy(entropy_bt: Tensor, mask_bt: Tensor, fraction: float) -> tuple[Tensor, float]:
    """The tokens of the highest entropy (arXiv 2506.01939), bool [B, T], and the smallest entropy among them, nats.

    entropy_bt is [B, T] of the whole batch. With N tokens in the mask, floor(fraction·(N − 1)) + 1 are kept, which are
    those at or above the quantile 1 − fraction as TRL computes it, and every token of the same entropy as the last of
    them. Without any token nothing is kept, and the entropy is 0.
    """
    mask_bt = mask_bt.bool()
    entropies = entropy_bt[mask_bt]
    if not entropies.numel():
        return mask_bt, 0.0
    kept = int(fraction * (entropies.numel() - 1) + ROUNDING) + 1
    threshold = entropies.kthvalue(entropies.numel() - kept + 1).values
    return mask_bt & (entropy_bt >= threshold), float(threshold)


@torch.no_grad()
def off_policy(
    logprobs_bt: Tensor, behaviour_logprobs_bt: Tensor, advantages_bt: Tensor, mask_bt: Tensor, limit: float
) -> Tensor:
    """The tokens that DeepSeek-V3.2 masks (arXiv 2512.02556, eq. 9), bool [B, T].

    They have a negative advantage and are in a sequence whose mean of log π_behaviour − log π is above `limit`, nats a
    token: a bad answer that the policy has moved away from. A sequence must not be divided over micro-batches.
    """
    mask_bt = mask_bt.bool()
    moved_b1 = sequence_mean(behaviour_logprobs_bt - logprobs_bt, mask_bt)
    return mask_bt & (advantages_bt < 0) & (moved_b1 > limit)


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


def check_finite(what: str, values_bt: Tensor, mask_bt: Tensor, labels: Sequence[str] | None = None) -> None:
    """Raises NonFinite if a value that counts is NaN or infinite. The error names the first such sequence and token.

    values_bt, mask_bt: [B, T]. `what` names the values in the error, for example "rewards"; `labels` are names of the
    sequences, which the error otherwise gives by their index.
    """
    bad_bt = mask_bt.bool() & ~values_bt.isfinite()
    rows = bad_bt.any(dim=-1).nonzero().flatten().tolist()
    if not rows:
        return
    row = rows[0]
    token = int(bad_bt[row].nonzero()[0])
    name = f"trajectory {labels[row]}" if labels is not None else f"sequence {row}"
    raise NonFinite(
        f"{what}: {values_bt[row, token].item()} at token {token} of {name}"
        f" ({int(bad_bt.sum())} such values in {len(rows)} of {values_bt.shape[0]} sequences).",
        "Nothing was written to the weights. Look at that trajectory's reward and log-probabilities; lower the learning"
        " rate or compute in fp32 if they overflowed.",
    )

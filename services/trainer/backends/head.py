"""Log-probabilities and entropies from hidden states, for a vocabulary that is split over ranks, without all logits.

Logits exist for a chunk of tokens and this rank's part of the vocabulary at a time, in the forward pass and again in
the backward pass. With z = logits/τ, p = softmax(z): ∂log p_y/∂z = 1_y − p and ∂H/∂z = −p·(log p + H). On GPUs
the computation on each logit is one compiled kernel, so that logits are read once in each pass.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class WantedTokens:
    """The tokens to score: the token after each of the positions."""

    positions_r: Tensor
    """Indices into the packed tokens, int64 [R]."""
    targets_r: Tensor
    """Ids of the tokens to score, int64 [R]."""
    temperature: float


@dataclass(frozen=True)
class VocabularyPart:
    """This rank's part of the vocabulary: tokens `start` to `start + size`, the first rows of its weight. The rows
    after them are padding."""

    start: int
    size: int
    group: dist.ProcessGroup | None
    """The ranks that hold all parts; None where this rank holds the whole vocabulary."""


def scores(
    hidden_rh: Tensor, weight_vh: Tensor, wanted: WantedTokens, vocabulary: VocabularyPart, chunk_tokens: int
) -> Tensor:
    """Log-probabilities at the targets and entropies, float32 [2, R], nats, the same on every rank of the group.

    hidden_rh [R, H] and weight_vh [padded part of V, H] of one dtype. The gradient of hidden_rh is this rank's part.
    """
    scores_2r: Tensor = _Scores.apply(hidden_rh, weight_vh, wanted, vocabulary, chunk_tokens)  # type: ignore[no-untyped-call]
    return scores_2r


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_rh: Tensor,
        weight_vh: Tensor,
        wanted: WantedTokens,
        vocabulary: VocabularyPart,
        chunk_tokens: int,
    ) -> Tensor:
        scores_2r = torch.empty(2, hidden_rh.shape[0], dtype=torch.float32, device=hidden_rh.device)
        normaliser_r = torch.empty_like(scores_2r[0])
        for part in _chunks(hidden_rh, chunk_tokens):
            logits_rv = hidden_rh[part] @ weight_vh[: vocabulary.size].t()
            normaliser_r[part], scores_2r[:, part] = _normalised(logits_rv, wanted, part, vocabulary)
        ctx.save_for_backward(hidden_rh, weight_vh, normaliser_r, scores_2r)
        ctx.rest = wanted, vocabulary, chunk_tokens
        return scores_2r

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_2r: Tensor) -> Any:
        hidden_rh, weight_vh, normaliser_r, scores_2r = ctx.saved_tensors
        wanted, vocabulary, chunk_tokens = ctx.rest
        rows = weight_vh[: vocabulary.size]
        grad_hidden_rh = torch.empty_like(hidden_rh)
        # float32: the sum over chunks would lose precision in the weight's dtype.
        grad_weight_vh = torch.zeros(weight_vh.shape, dtype=torch.float32, device=weight_vh.device)
        for part in _chunks(hidden_rh, chunk_tokens):
            here_r, column_r = _in_part(wanted.targets_r[part], vocabulary)
            grad_logits = _fused(_logits_gradient)(
                hidden_rh[part] @ rows.t(),
                torch.stack([normaliser_r[part], scores_2r[1, part], *grad_2r[:, part]]),
                torch.where(here_r, column_r, -1),
                1.0 / wanted.temperature,
            )
            grad_hidden_rh[part] = grad_logits @ rows
            grad_weight_vh[: vocabulary.size] += grad_logits.t() @ hidden_rh[part]
        return grad_hidden_rh, grad_weight_vh.to(weight_vh.dtype), None, None, None


def _normalised(
    logits_rv: Tensor, wanted: WantedTokens, part: slice, vocabulary: VocabularyPart
) -> tuple[Tensor, Tensor]:
    """log Σ exp z over the whole vocabulary, [R], and the scores, [2, R]."""
    scale = 1.0 / wanted.temperature
    local_r, sums_2r = _fused(_part_sums)(logits_rv, scale)
    top_r = local_r.clone()
    _all_reduce(top_r, dist.ReduceOp.MAX, vocabulary)
    here_r, column_r = _in_part(wanted.targets_r[part], vocabulary)
    target_r = logits_rv.gather(1, column_r[:, None])[:, 0].float() * scale * here_r
    sums_3r = torch.cat([sums_2r * (local_r - top_r).exp(), target_r[None]])
    _all_reduce(sums_3r, dist.ReduceOp.SUM, vocabulary)
    normaliser_r = top_r + sums_3r[0].log()
    return normaliser_r, torch.stack([sums_3r[2] - normaliser_r, normaliser_r - sums_3r[1] / sums_3r[0]])


def _part_sums(logits_rv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """max z, [R], and Σ exp(z − max) and Σ z·exp(z − max), [2, R], all float32."""
    z_rv = logits_rv.float() * scale
    top_r = z_rv.amax(dim=-1)
    weights_rv = (z_rv - top_r[:, None]).exp()
    return top_r, torch.stack([weights_rv.sum(dim=-1), (weights_rv * z_rv).sum(dim=-1)])


def _logits_gradient(logits_rv: Tensor, known_4r: Tensor, column_r: Tensor, scale: float) -> Tensor:
    """The gradient of the logits, [R, V], in their dtype.

    `known_4r`: normaliser, entropy, and the gradients of log-probability and entropy. `column_r`: the column of the
    target, negative where another rank has it.
    """
    normaliser, entropy, grad_logprob, grad_entropy = (known_r[:, None] for known_r in known_4r)
    log_p = logits_rv.float() * scale - normaliser
    grad_z = -log_p.exp() * (grad_logprob + grad_entropy * (log_p + entropy))
    hit = torch.arange(logits_rv.shape[1], device=logits_rv.device) == column_r[:, None]
    grad_rv: Tensor = ((grad_z + torch.where(hit, grad_logprob, 0.0)) * scale).to(logits_rv.dtype)
    return grad_rv


@functools.cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled to one kernel on GPUs, and unchanged elsewhere."""
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True) if torch.cuda.is_available() else function
    return compiled


def _in_part(targets_r: Tensor, vocabulary: VocabularyPart) -> tuple[Tensor, Tensor]:
    """Whether each target is in this rank's part, and its column there (any column where it is not)."""
    column_r = targets_r - vocabulary.start
    here_r = (column_r >= 0) & (column_r < vocabulary.size)
    return here_r, column_r.clamp(0, vocabulary.size - 1)


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, vocabulary: VocabularyPart) -> None:
    if vocabulary.group is not None:
        dist.all_reduce(tensor, op, group=vocabulary.group)


def _chunks(hidden_rh: Tensor, tokens: int) -> list[slice]:
    return [slice(start, start + tokens) for start in range(0, hidden_rh.shape[0], tokens)]

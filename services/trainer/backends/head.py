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
    others_rk: Tensor | None = None
    """Further tokens to score at each of the positions, int64 [R, K]; None: there are none."""

    @property
    def columns_rk(self) -> Tensor:
        """The tokens to score at each position: the target first, then the others, int64 [R, 1 + K]."""
        targets_r1 = self.targets_r[:, None]
        return targets_r1 if self.others_rk is None else torch.cat([targets_r1, self.others_rk], dim=1)


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
    """Log-probabilities at the targets, entropies, and log-probabilities of the other tokens, float32 [2 + K, R], nats,
    the same on every rank of the group.

    hidden_rh [R, H] and weight_vh [padded part of V, H] of one dtype. The gradient of hidden_rh is this rank's part. A
    frozen weight has no gradient, and none is computed.
    """
    scores_kr: Tensor = _Scores.apply(hidden_rh, weight_vh, wanted, vocabulary, chunk_tokens)  # type: ignore[no-untyped-call]
    return scores_kr


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
        rows = 1 + wanted.columns_rk.shape[1]
        scores_kr = torch.empty(rows, hidden_rh.shape[0], dtype=torch.float32, device=hidden_rh.device)
        normaliser_r = torch.empty_like(scores_kr[0])
        for part in _chunks(hidden_rh, chunk_tokens):
            logits_rv = hidden_rh[part] @ weight_vh[: vocabulary.size].t()
            normaliser_r[part], scores_kr[:, part] = _normalised(logits_rv, wanted, part, vocabulary)
        ctx.save_for_backward(hidden_rh, weight_vh, normaliser_r, scores_kr)
        ctx.rest = wanted, vocabulary, chunk_tokens
        return scores_kr

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kr: Tensor) -> Any:
        hidden_rh, weight_vh, normaliser_r, scores_kr = ctx.saved_tensors
        wanted, vocabulary, chunk_tokens = ctx.rest
        rows = weight_vh[: vocabulary.size]
        grad_hidden_rh = torch.empty_like(hidden_rh) if ctx.needs_input_grad[0] else None
        grad_weight_vh = _zeros_like(weight_vh) if ctx.needs_input_grad[1] else None
        for part in _chunks(hidden_rh, chunk_tokens):
            here_rk, column_rk = _in_part(wanted.columns_rk[part], vocabulary)
            grad_entropy_r, grad_rk = grad_kr[1, part], torch.cat([grad_kr[:1, part], grad_kr[2:, part]]).t()
            grad_logits = _fused(_logits_gradient)(
                hidden_rh[part] @ rows.t(),
                torch.stack([normaliser_r[part], scores_kr[1, part], grad_rk.sum(1), grad_entropy_r, grad_rk[:, 0]]),
                torch.where(here_rk[:, 0], column_rk[:, 0], -1),
                1.0 / wanted.temperature,
            )
            if column_rk.shape[1] > 1:
                added_rk = grad_rk[:, 1:] * here_rk[:, 1:] / wanted.temperature
                grad_logits.scatter_add_(1, column_rk[:, 1:], added_rk.to(grad_logits.dtype))
            if grad_hidden_rh is not None:
                grad_hidden_rh[part] = grad_logits @ rows
            if grad_weight_vh is not None:
                grad_weight_vh[: vocabulary.size] += grad_logits.t() @ hidden_rh[part]
        grad_weight = None if grad_weight_vh is None else grad_weight_vh.to(weight_vh.dtype)
        return grad_hidden_rh, grad_weight, None, None, None


def _zeros_like(parameter: Tensor) -> Tensor:
    """float32: a gradient that is summed over chunks would lose precision in the parameter's dtype."""
    return torch.zeros_like(parameter, dtype=torch.float32)


def _normalised(
    logits_rv: Tensor, wanted: WantedTokens, part: slice, vocabulary: VocabularyPart
) -> tuple[Tensor, Tensor]:
    """log Σ exp z over the whole vocabulary, [R], and the scores, [2 + K, R]."""
    scale = 1.0 / wanted.temperature
    local_r, sums_2r = _fused(_part_sums)(logits_rv, scale)
    top_r = local_r.clone()
    _all_reduce(top_r, dist.ReduceOp.MAX, vocabulary)
    here_rk, column_rk = _in_part(wanted.columns_rk[part], vocabulary)
    wanted_rk = logits_rv.gather(1, column_rk).float() * scale * here_rk
    sums_kr = torch.cat([sums_2r * (local_r - top_r).exp(), wanted_rk.t()])
    _all_reduce(sums_kr, dist.ReduceOp.SUM, vocabulary)
    normaliser_r = top_r + sums_kr[0].log()
    entropy_r = normaliser_r - sums_kr[1] / sums_kr[0]
    return normaliser_r, torch.cat([(sums_kr[2] - normaliser_r)[None], entropy_r[None], sums_kr[3:] - normaliser_r])


def _part_sums(logits_rv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """max z, [R], and Σ exp(z − max) and Σ z·exp(z − max), [2, R], all float32."""
    z_rv = logits_rv.float() * scale
    top_r = z_rv.amax(dim=-1)
    weights_rv = (z_rv - top_r[:, None]).exp()
    return top_r, torch.stack([weights_rv.sum(dim=-1), (weights_rv * z_rv).sum(dim=-1)])


def _logits_gradient(logits_rv: Tensor, known_5r: Tensor, column_r: Tensor, scale: float) -> Tensor:
    """The gradient of the logits, [R, V], in their dtype, without what the other tokens add in their columns.

    `known_5r`: normaliser, entropy, and the gradients of the sum of all log-probabilities, of the entropy, and of the
    target's log-probability. `column_r`: the column of the target, negative where another rank has it.
    """
    normaliser, entropy, grad_sum, grad_entropy, grad_target = (known_r[:, None] for known_r in known_5r)
    log_p = logits_rv.float() * scale - normaliser
    grad_z = -log_p.exp() * (grad_sum + grad_entropy * (log_p + entropy))
    hit = torch.arange(logits_rv.shape[1], device=logits_rv.device) == column_r[:, None]
    grad_rv: Tensor = ((grad_z + torch.where(hit, grad_target, 0.0)) * scale).to(logits_rv.dtype)
    return grad_rv


@functools.cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled to one kernel on GPUs, and unchanged elsewhere."""
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True) if torch.cuda.is_available() else function
    return compiled


def _in_part(tokens_rk: Tensor, vocabulary: VocabularyPart) -> tuple[Tensor, Tensor]:
    """Whether each token is in this rank's part, and its column there (any column where it is not)."""
    column_rk = tokens_rk - vocabulary.start
    here_rk = (column_rk >= 0) & (column_rk < vocabulary.size)
    return here_rk, column_rk.clamp(0, vocabulary.size - 1)


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, vocabulary: VocabularyPart) -> None:
    if vocabulary.group is not None:
        dist.all_reduce(tensor, op, group=vocabulary.group)


def _chunks(hidden_rh: Tensor, tokens: int) -> list[slice]:
    return [slice(start, start + tokens) for start in range(0, hidden_rh.shape[0], tokens)]

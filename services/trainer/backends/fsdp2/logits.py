"""Log-probabilities and entropies of chosen tokens from logits, without a float32 copy of all logits."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 64 << 20
"""Size of one float32 chunk of logits."""


def token_scores(logits_rv: Tensor, targets_r: Tensor, temperature: float, others_rk: Tensor | None = None) -> Tensor:
    """log softmax(logits/temperature) at the targets, the entropy of that distribution, and the log-probabilities of
    the other tokens: float32 [2 + K, R], in nats.

    logits_rv: [R, V], any float dtype. Forward and backward work in chunks of tokens and keep only the given logits.
    """
    targets_r1 = targets_r[:, None]
    columns_rk = targets_r1 if others_rk is None else torch.cat([targets_r1, others_rk], dim=1)
    scores_kr: Tensor = _Scores.apply(logits_rv, columns_rk, temperature)  # type: ignore[no-untyped-call]
    return scores_kr


class _Scores(torch.autograd.Function):
    """Gradients, with p = softmax(z/τ): ∂log p_y/∂z = (1_y − p)/τ and ∂H/∂z = −p·(log p + H)/τ."""

    @staticmethod
    def forward(ctx: Any, logits_rv: Tensor, columns_rk: Tensor, temperature: float) -> Tensor:
        rows, tokens = 1 + columns_rk.shape[1], logits_rv.shape[0]
        scores_kr = torch.empty(rows, tokens, dtype=torch.float32, device=logits_rv.device)
        normaliser_r = torch.empty_like(scores_kr[0])
        for part in _chunks(logits_rv):
            scaled = logits_rv[part].float() / temperature
            normaliser_r[part] = scaled.logsumexp(dim=-1)
            found_kr = scaled.gather(-1, columns_rk[part]).t() - normaliser_r[part]
            scores_kr[0, part], scores_kr[2:, part] = found_kr[0], found_kr[1:]
            log_p = scaled - normaliser_r[part, None]  # lse − Σ p·z would cancel where one token has nearly all
            scores_kr[1, part] = -(log_p.exp() * log_p).sum(dim=-1)
        ctx.save_for_backward(logits_rv, columns_rk, normaliser_r, scores_kr)
        ctx.temperature = temperature
        return scores_kr

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kr: Tensor) -> Any:
        logits_rv, columns_rk, normaliser_r, scores_kr = ctx.saved_tensors
        grad_rv = torch.empty_like(logits_rv)
        for part in _chunks(logits_rv):
            log_p = logits_rv[part].float() / ctx.temperature - normaliser_r[part, None]
            grad_rk = torch.cat([grad_kr[:1, part], grad_kr[2:, part]]).t()
            grad_entropy = grad_kr[1, part, None]
            grad = -log_p.exp() * (grad_rk.sum(1, keepdim=True) + grad_entropy * (log_p + scores_kr[1, part, None]))
            grad.scatter_add_(-1, columns_rk[part], grad_rk)
            grad_rv[part] = (grad / ctx.temperature).to(grad_rv.dtype)
        return grad_rv, None, None


def _chunks(logits_rv: Tensor) -> list[slice]:
    tokens = max(1, CHUNK_BYTES // (4 * logits_rv.shape[1]))
    return [slice(start, start + tokens) for start in range(0, logits_rv.shape[0], tokens)]

"""Log-probabilities and entropies of chosen tokens from logits, without a float32 copy of all logits."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 64 << 20
"""Size of one float32 chunk of logits."""


def token_scores(logits_rv: Tensor, targets_r: Tensor, temperature: float) -> Tensor:
    """log softmax(logits/temperature) at the targets, and the entropy of that distribution: float32 [2, R], in nats.

    logits_rv: [R, V], any float dtype. Forward and backward work in chunks of tokens and keep only the given logits.
    """
    scores_2r: Tensor = _Scores.apply(logits_rv, targets_r, temperature)  # type: ignore[no-untyped-call]
    return scores_2r


class _Scores(torch.autograd.Function):
    """Gradients, with p = softmax(z/τ): ∂log p_y/∂z = (1_y − p)/τ and ∂H/∂z = −p·(log p + H)/τ."""

    @staticmethod
    def forward(ctx: Any, logits_rv: Tensor, targets_r: Tensor, temperature: float) -> Tensor:
        scores_2r = torch.empty(2, logits_rv.shape[0], dtype=torch.float32, device=logits_rv.device)
        normaliser_r = torch.empty_like(scores_2r[0])
        for part in _chunks(logits_rv):
            scaled = logits_rv[part].float() / temperature
            normaliser_r[part] = scaled.logsumexp(dim=-1)
            scores_2r[0, part] = scaled.gather(-1, targets_r[part, None]).squeeze(-1) - normaliser_r[part]
            log_p = scaled - normaliser_r[part, None]  # lse − Σ p·z would cancel where one token has nearly all
            scores_2r[1, part] = -(log_p.exp() * log_p).sum(dim=-1)
        ctx.save_for_backward(logits_rv, targets_r, normaliser_r, scores_2r)
        ctx.temperature = temperature
        return scores_2r

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_2r: Tensor) -> Any:
        logits_rv, targets_r, normaliser_r, scores_2r = ctx.saved_tensors
        grad_rv = torch.empty_like(logits_rv)
        for part in _chunks(logits_rv):
            log_p = logits_rv[part].float() / ctx.temperature - normaliser_r[part, None]
            grad_logprob, grad_entropy = grad_2r[:, part, None]
            grad = -log_p.exp() * (grad_logprob + grad_entropy * (log_p + scores_2r[1, part, None]))
            grad.scatter_add_(-1, targets_r[part, None], grad_logprob)
            grad_rv[part] = (grad / ctx.temperature).to(grad_rv.dtype)
        return grad_rv, None, None


def _chunks(logits_rv: Tensor) -> list[slice]:
    tokens = max(1, CHUNK_BYTES // (4 * logits_rv.shape[1]))
    return [slice(start, start + tokens) for start in range(0, logits_rv.shape[0], tokens)]

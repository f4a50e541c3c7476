"""Log-probabilities and entropies of chosen tokens from logits, without a float32 copy of all logits."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 64 << 20
"""Size of one float32 chunk of logits."""


def token_scores(
    logits_rv: Tensor, targets_r: Tensor, temperature: float, *, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits/temperature) at the targets, and the entropy of that distribution: float32 [R], in nats.

    logits_rv: [R, V], any float dtype. Forward and backward work in chunks of tokens and keep only the given logits.
    """
    scores: tuple[Tensor, Tensor] = _Scores.apply(logits_rv, targets_r, temperature, entropy)  # type: ignore[no-untyped-call]
    logprobs_r, entropy_r = scores
    return logprobs_r, entropy_r if entropy else None


class _Scores(torch.autograd.Function):
    """Gradients, with p = softmax(z/τ): ∂log p_y/∂z = (1_y − p)/τ and ∂H/∂z = −p·(log p + H)/τ."""

    @staticmethod
    def forward(ctx: Any, logits_rv: Tensor, targets_r: Tensor, temperature: float, entropy: bool) -> Any:
        logprobs_r = torch.empty(logits_rv.shape[0], dtype=torch.float32, device=logits_rv.device)
        normaliser_r, entropy_r = torch.empty_like(logprobs_r), torch.empty_like(logprobs_r)
        for part in _chunks(logits_rv):
            scaled = logits_rv[part].float() / temperature
            normaliser_r[part] = scaled.logsumexp(dim=-1)
            logprobs_r[part] = scaled.gather(-1, targets_r[part, None]).squeeze(-1) - normaliser_r[part]
            if entropy:
                log_p = scaled - normaliser_r[part, None]  # lse − Σ p·z would cancel where one token has nearly all
                entropy_r[part] = -(log_p.exp() * log_p).sum(dim=-1)
        ctx.save_for_backward(logits_rv, targets_r, normaliser_r, entropy_r)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs_r, entropy_r

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_r: Tensor | None, grad_entropy_r: Tensor | None) -> Any:
        logits_rv, targets_r, normaliser_r, entropy_r = ctx.saved_tensors
        grad_rv = torch.zeros_like(logits_rv)
        for part in _chunks(logits_rv):
            log_p = logits_rv[part].float() / ctx.temperature - normaliser_r[part, None]
            grad = torch.zeros_like(log_p)
            if grad_entropy_r is not None:
                grad -= grad_entropy_r[part, None] * log_p.exp() * (log_p + entropy_r[part, None])
            if grad_logprobs_r is not None:
                grad -= grad_logprobs_r[part, None] * log_p.exp()
                grad.scatter_add_(-1, targets_r[part, None], grad_logprobs_r[part, None])
            grad_rv[part] = (grad / ctx.temperature).to(grad_rv.dtype)
        return grad_rv, None, None, None


def _chunks(logits_rv: Tensor) -> list[slice]:
    tokens = max(1, CHUNK_BYTES // (4 * logits_rv.shape[1]))
    return [slice(start, start + tokens) for start in range(0, logits_rv.shape[0], tokens)]

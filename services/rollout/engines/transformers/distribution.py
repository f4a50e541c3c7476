"""The distribution that is sampled from: temperature, then top-k, then top-p, as vLLM orders them."""

import torch


def processed_logprobs(
    logits_bv: torch.Tensor, temperature_b: torch.Tensor, top_k_b: torch.Tensor, top_p_b: torch.Tensor
) -> torch.Tensor:
    """Log-probabilities [B, V], float32, of the distribution that is sampled from; -inf for tokens that are cut.

    Rows of temperature 0 are greedy: their log-probabilities are the model's own, at temperature 1 and uncut. `top_k_b`
    of 0 and `top_p_b` of 1 keep every token.
    """
    greedy_b = temperature_b == 0
    logits_bv = logits_bv.float() / torch.where(greedy_b, 1.0, temperature_b)[:, None]
    top_k_b = torch.where(greedy_b | (top_k_b <= 0), logits_bv.shape[-1], top_k_b)
    top_p_b = torch.where(greedy_b, 1.0, top_p_b)
    if bool((top_k_b < logits_bv.shape[-1]).any()) or bool((top_p_b < 1).any()):
        logits_bv = logits_bv.masked_fill(_cut(logits_bv, top_k_b, top_p_b), -torch.inf)
    return logits_bv.log_softmax(-1)


def _cut(logits_bv: torch.Tensor, top_k_b: torch.Tensor, top_p_b: torch.Tensor) -> torch.Tensor:
    """Which tokens are cut, bool [B, V]. The most likely token is never cut."""
    sorted_bv, order_bv = logits_bv.sort(-1, descending=True)
    rank_v = torch.arange(logits_bv.shape[-1], device=logits_bv.device)
    beyond_bv = rank_v >= top_k_b[:, None]
    probs_bv = sorted_bv.masked_fill(beyond_bv, -torch.inf).softmax(-1)
    before_bv = probs_bv.cumsum(-1) - probs_bv
    beyond_bv |= (before_bv >= top_p_b[:, None]) & (top_p_b[:, None] < 1) & (rank_v > 0)
    return torch.zeros_like(beyond_bv).scatter(-1, order_bv, beyond_bv)


def draw(logprobs_bv: torch.Tensor, greedy_b: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token for each row, int64 [B]. If a row has NaN there is nothing to draw from: its token is 0, and its
    log-probability NaN."""
    broken_b = logprobs_bv.isnan().any(-1)
    weights_bv = logprobs_bv.exp().masked_fill(broken_b[:, None], 1.0)
    drawn_b = torch.multinomial(weights_bv, 1, generator=generator).squeeze(-1)
    return torch.where(greedy_b, logprobs_bv.argmax(-1), drawn_b).masked_fill(broken_b, 0)

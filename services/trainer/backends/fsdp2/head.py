"""Token scores of a Hugging Face model without logits of the whole micro-batch.

Most causal language models end in one linear layer, and some scale or cap what it gives. For those the token scores are
computed from the hidden states, a chunk of tokens at a time (`services.trainer.backends.head`). Any other model is
scored from its logits, without a float32 copy of all of them (`token_scores`).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from millrace.fsdp2.architectures import MORE_LAYERS
from services.trainer.backends.head import LogitChange, VocabularyPart, WantedTokens, scores

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


FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Config entries that multiply the output of the linear layer."""
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""Config entries that divide it, or the hidden states before it."""
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Config entries with its soft cap, which comes last."""
MULTIPLIES = frozenset({"hyperclovax"})
"""Model types that multiply by what divides in others."""


def obstacle(module: PreTrainedModel) -> str | None:
    """Why the token scores of this model need its logits; None if they can be computed from hidden states."""
    head, config = module.get_output_embeddings(), module.config.get_text_config()
    if hasattr(head, "base_layer"):
        return "its output layer has an adapter"
    if type(head) is not nn.Linear:
        return f"its output layer is {type(head).__name__}, not a linear layer alone"
    if module.base_model is module or config.model_type in MORE_LAYERS:
        return f"the output layer of {type(module).__name__} does not follow its last hidden states directly"
    entries = {name: getattr(config, name, None) for name in (*FACTORS, *DIVISORS, *CAPS)}
    strange = [name for name, value in entries.items() if not isinstance(value, (int, float, type(None)))]
    if strange:
        return f"{strange[0]} of its config is {entries[strange[0]]!r}, not a number"
    return None


def logit_change(config: Any) -> LogitChange:
    """What a model with this config (of the text part) does to the output of its linear layer."""
    scale = 1.0
    for name in (*FACTORS, *DIVISORS):
        value = getattr(config, name, None)
        if value is not None:
            multiplies = name in FACTORS or config.model_type in MULTIPLIES
            scale *= value if multiplies else 1 / value
    return LogitChange(scale, next((cap for name in CAPS if (cap := getattr(config, name, None)) is not None), None))


def install(module: PreTrainedModel, chunk_tokens: int) -> None:
    """Adds the keyword `wanted` to the forward pass of a model without an `obstacle`: with it the pass returns float32
    [2 + K, R], what `services.trainer.backends.head.scores` gives for the wanted tokens.

    A module sharded by FSDP is allowed: the hooks of FSDP run around the forward pass and gather the head's weight.
    """
    own, config = module.forward, module.config.get_text_config()
    # Rows of some models' heads after the vocabulary are padding, and their logits are cut off.
    size = getattr(config, "unpadded_vocab_size", None) or module.get_output_embeddings().weight.shape[0]
    vocabulary, change = VocabularyPart(0, size, None), logit_change(config)

    def forward(*arguments: Any, wanted: WantedTokens | None = None, **inputs: Any) -> Any:
        if wanted is None:
            return own(*arguments, **inputs)
        hidden_rh = module.base_model(**inputs).last_hidden_state[0].index_select(0, wanted.positions_r)
        head = module.get_output_embeddings()
        return scores(hidden_rh, head.weight, wanted, vocabulary, chunk_tokens, bias_v=head.bias, change=change)

    module.forward = forward


def agrees(scores_2r: Tensor, logprobs_r: Tensor) -> bool:
    """Whether scores from hidden states equal those from the model's logits, within rounding. A model with first
    values gives all tokens nearly the same log-probability: how they differ from one another has to agree too."""
    if not torch.allclose(scores_2r[0], logprobs_r, rtol=0.02, atol=0.02):
        return False
    deviation_r = (scores_2r[0] - scores_2r[0].mean()) - (logprobs_r - logprobs_r.mean())
    return bool(deviation_r.abs().max() <= 0.001 + 0.2 * logprobs_r.std())

"""Token scores of a Hugging Face model without logits of the whole micro-batch.

Most causal language models end in one linear layer, and some scale or cap what it gives. For those the token scores are
computed from the hidden states, a chunk of tokens at a time (`services.trainer.backends.head`). Any other model is
scored from its logits (`logits`).
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from millrace.fsdp2.logits import MORE_LAYERS
from services.trainer.backends.head import LogitChange, VocabularyPart, WantedTokens, scores

FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Config entries that multiply the output of the linear layer."""
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""Config entries that divide it, or the hidden states before it."""
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Config entries with its soft cap, which comes last."""
MULTIPLIES = frozenset({"hyperclovax"})
"""Model types that multiply by what divides in others."""


def obstacle(module: PreTrainedModel) -> str | None:
    """Why the token scores of this model need its logits; None where they can be computed from hidden states."""
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

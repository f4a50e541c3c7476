"""Token scores of a Hugging Face model without logits of the whole micro-batch.

Most causal language models end in one linear layer. For those the token scores are computed from the hidden states, a
chunk of tokens at a time (`services.trainer.backends.head`). A model that changes its logits afterwards is scored from
its logits (`logits`).
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.trainer.backends.head import VocabularyPart, WantedTokens, scores

LOGIT_SETTINGS = ("final_logit_softcapping", "logits_soft_cap", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Config entries of models whose logits are not the output of the linear layer alone."""


def install(module: PreTrainedModel, chunk_tokens: int) -> bool:
    """Adds the keyword `wanted` to a model's forward pass: with it the pass returns float32 [2 + K, R], what
    `services.trainer.backends.head.scores` gives for the wanted tokens. Returns False, and changes nothing, where the
    model's head does not allow that.

    A module sharded by FSDP is allowed: the hooks of FSDP run around the forward pass and gather the head's weight.
    """
    head = module.get_output_embeddings()
    config = module.config.get_text_config()
    if type(head) is not nn.Linear or head.bias is not None or module.base_model is module:
        return False
    if any(getattr(config, name, None) not in (None, 1, 1.0) for name in LOGIT_SETTINGS):
        return False
    own, vocabulary = module.forward, VocabularyPart(0, head.weight.shape[0], None)

    def forward(*arguments: Any, wanted: WantedTokens | None = None, **inputs: Any) -> Any:
        if wanted is None:
            return own(*arguments, **inputs)
        hidden_rh = module.base_model(**inputs).last_hidden_state[0].index_select(0, wanted.positions_r)
        weight_vh = module.get_output_embeddings().weight
        return scores(hidden_rh, weight_vh, wanted, vocabulary, chunk_tokens)

    module.forward = forward
    return True


def agrees(scores_2r: Tensor, logprobs_r: Tensor) -> bool:
    """Whether scores from hidden states equal those from the model's logits, within rounding."""
    return torch.allclose(scores_2r[0], logprobs_r, rtol=0.02, atol=0.02)

"""Tokenizers and chat templates that make conversations hard to extend."""

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from millrace.ids import Version
from services.rollout.engine import Completion, StopReason, VersionSpan

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
ROLES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""No special token between the turns."""
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS_THINKING = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
"""As many models' templates do, it leaves the thinking of earlier turns out."""
TRIMS = CHATML.replace("m.content", "m.content | trim")


def merging_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that merges the ends of lines with what stands beside them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    line = "Ċ"
    merges = [(".", line), ("!", line), (line, "u"), (line, "a"), (":", "Ġ")]
    vocab = {symbol: i for i, symbol in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(list(SPECIALS))
    bpe.add_tokens(list(MARKERS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=SPECIALS[2],
        pad_token=SPECIALS[0],
        additional_special_tokens=[SPECIALS[1]],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def sampled(tokens: Sequence[int], stop: StopReason = StopReason.END_OF_TURN) -> Completion:
    """A sample of these tokens, all of version 0."""
    count = len(tokens)
    spans = (VersionSpan(Version(0), 0, count),)
    return Completion(np.array(tokens, np.int32), np.full(count, -0.5, np.float32), spans, stop, "")

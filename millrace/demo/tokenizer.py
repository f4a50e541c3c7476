"""A tokenizer that needs no training: 256 byte symbols, no merges, three special tokens, ChatML.

Programs outside of this repository import `byte_tokenizer` from here; `tests/test_import_paths.py` keeps the path.
"""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from millrace.demo.tasks import IMAGE, VISION_END, VISION_START

END_OF_TEXT, TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHOWN = f"{{% if part.type == 'image' %}}{VISION_START}{IMAGE}{VISION_END}{{% else %}}{{{{ part.text }}}}{{% endif %}}"
CHAT_TEMPLATE_WITH_IMAGES = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    f"{{% else %}}{{% for part in message['content'] %}}{SHOWN}{{% endfor %}}{{% endif %}}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(more: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """259 tokens and `more`: every other text is one token a byte, and decodes to itself."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (END_OF_TEXT, TURN, END_OF_TURN)])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in more])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TURN, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    made.chat_template = CHAT_TEMPLATE_WITH_IMAGES if IMAGE in more else CHAT_TEMPLATE
    return made

"""A prompt and an answer as a reward model reads them: its own chat template, its own tokens."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from millrace.data.chat import Tokenizer


def tokens_of(prompt: Any, answer: str, tokenizer: Tokenizer, options: Mapping[str, Any]) -> NDArray[np.int32] | str:
    """The tokens of a conversation, int32 [T], or why there are none. `prompt` is a list of messages, to which the
    answer is added as the assistant's, or plain text that the answer follows."""
    try:
        if isinstance(prompt, str):
            tokens = list(tokenizer.encode(prompt + answer))
        else:
            messages = [*prompt, {"role": "assistant", "content": answer}]
            arguments = {**options, "add_generation_prompt": False, "tokenize": True, "return_dict": False}
            tokens = list(tokenizer.apply_chat_template(messages, **arguments))
    except (TemplateError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        return f"the reward model's tokenizer refuses the conversation: {error}"
    return np.asarray(tokens, np.int32) if tokens else "the conversation has no tokens"

"""Conversations as the model of a pool reads them: its own chat template, its own tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from millrace.data.chat import Tokenizer
from services.rollout.engine import Sampling

REFUSALS = (TemplateError, ValueError, TypeError, KeyError, IndexError, AttributeError)
"""What tokenizers and chat templates raise for conversations that they cannot make into tokens."""


@dataclass(frozen=True)
class Conversation:
    """Messages to which a model replies."""

    messages: Sequence[Mapping[str, Any]]
    """The content of each as text."""
    sampling: Sampling
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the model's chat template."""


def tokens_of(prompt: Any, answer: str, tokenizer: Tokenizer, options: Mapping[str, Any]) -> NDArray[np.int32] | str:
    """The tokens of a conversation, int32 [T], or why there are none. `prompt` is a list of messages, to which the
    answer is added as the assistant's, or plain text that the answer follows."""
    try:
        if isinstance(prompt, str):
            tokens = list(tokenizer.encode(prompt + answer))
        else:
            messages = [*prompt, {"role": "assistant", "content": answer}]
            tokens = _templated(messages, tokenizer, options, reply=False)
    except REFUSALS as error:
        return f"the reward model's tokenizer refuses the conversation: {error}"
    return np.asarray(tokens, np.int32) if tokens else "the conversation has no tokens"


def prompt_of(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, options: Mapping[str, Any]) -> list[int]:
    """The tokens after which the model replies to the messages. Raises one of REFUSALS."""
    return _templated(messages, tokenizer, options, reply=True)


def _templated(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, options: Mapping[str, Any], *, reply: bool
) -> list[int]:
    arguments = {**options, "add_generation_prompt": reply, "tokenize": True, "return_dict": False}
    return list(tokenizer.apply_chat_template(list(messages), **arguments))

"""From rows to tokens, with a real tokenizer made on the spot."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from millrace.data import PromptRow
from millrace.data.chat import Rendered, fit, render
from millrace.drops import Drop, DropReason
from millrace.errors import BadRow

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinking %}<think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


def row(prompt: Any) -> PromptRow:
    return PromptRow(4, "demo", prompt, "x")


def test_messages_go_through_the_template(tokenizer: Any) -> None:
    rendered = render(row([{"role": "user", "content": "hé"}]), tokenizer, max_tokens=100)
    assert tokenizer.decode(rendered.token_ids) == "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    assert rendered.dropped is None and rendered.cut == 0
    assert all(type(token) is int for token in rendered.token_ids)


def test_options_reach_the_template(tokenizer: Any) -> None:
    prompt = row([{"role": "user", "content": "h"}])
    thinking = render(prompt, tokenizer, max_tokens=100, chat_template_options={"thinking": True})
    assert tokenizer.decode(thinking.token_ids).endswith("assistant\n<think>")
    bare = render(prompt, tokenizer, max_tokens=100, chat_template_options={"add_generation_prompt": False})
    assert tokenizer.decode(bare.token_ids).endswith("<|im_end|>\n")


def test_a_text_is_asked_as_it_is(tokenizer: Any) -> None:
    assert tokenizer.decode(render(row("once upon"), tokenizer, max_tokens=100).token_ids) == "once upon"


def test_an_overlong_prompt_is_dropped_with_its_length(tokenizer: Any) -> None:
    rendered = render(row("x" * 12), tokenizer, max_tokens=10)
    assert rendered == Rendered([], dropped=Drop(DropReason.PROMPT_TOO_LONG, "12 > 10 tokens"))


def test_a_prompt_of_exactly_the_limit_stays(tokenizer: Any) -> None:
    assert len(render(row("x" * 10), tokenizer, max_tokens=10).token_ids) == 10


@pytest.mark.parametrize(
    ("overlong", "left"), [("truncate_left", "3456789"), ("truncate_right", "0123456"), ("truncate_middle", "0126789")]
)
def test_an_overlong_prompt_is_cut(overlong: Any, left: str, tokenizer: Any) -> None:
    rendered = render(row("0123456789"), tokenizer, max_tokens=7, overlong=overlong)
    assert (tokenizer.decode(rendered.token_ids), rendered.cut, rendered.dropped) == (left, 3, None)


@given(st.integers(0, 30), st.integers(1, 40), st.sampled_from(["truncate_left", "truncate_right", "truncate_middle"]))
def test_cutting_keeps_as_much_as_fits_and_the_order(length: int, limit: int, overlong: Any) -> None:
    fitted = fit(list(range(length)), limit, overlong)
    assert len(fitted.token_ids) == min(length, limit)
    assert fitted.token_ids == sorted(set(fitted.token_ids))
    assert fitted.cut == max(0, length - limit)


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [([{"role": "tool", "content": "x"}], "no tools here"), ("", "an empty prompt")],
)
def test_what_the_tokenizer_refuses_costs_the_row(prompt: Any, complaint: str, tokenizer: Any) -> None:
    with pytest.raises(BadRow, match=complaint) as bad:
        render(row(prompt), tokenizer, max_tokens=10)
    assert "row 4 of demo" in bad.value.what and bad.value.fix


def test_a_tokenizer_without_template_costs_the_row() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=RawTokenizer(models.BPE(vocab={"a": 0}, merges=[])))
    with pytest.raises(BadRow, match="chat_template"):
        render(row([{"role": "user", "content": "a"}]), bare, max_tokens=10)


class Counting:
    """A tokenizer whose tokens have `width` characters each. It counts the characters that it encoded."""

    def __init__(self, width: int) -> None:
        self.width, self.encoded = width, 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.encoded += len(text)
        return [0] * (len(text) // self.width)

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, **_: Any) -> Any:
        text = "".join(message["content"] for message in conversation)
        return self.encode(text) if tokenize else text


@pytest.mark.parametrize("prompt", ["x" * 20_000_000, [{"role": "user", "content": "x" * 20_000_000}]])
def test_of_a_huge_prompt_only_the_beginning_is_encoded(prompt: Any) -> None:
    tokenizer = Counting(4)
    rendered = render(row(prompt), tokenizer, max_tokens=1000)
    assert rendered.dropped == Drop(DropReason.PROMPT_TOO_LONG, "more than 1000 tokens: 20000000 characters")
    assert tokenizer.encoded < 50_000
    assert len(render(row(prompt), Counting(20_000), max_tokens=1000).token_ids) == 1000


@pytest.mark.parametrize("prompt", ["x" * 20_000_000, [{"role": "user", "content": "x" * 20_000_000}]])
def test_of_a_huge_prompt_that_is_cut_at_the_end_only_the_beginning_is_encoded(prompt: Any) -> None:
    tokenizer = Counting(4)
    assert len(render(row(prompt), tokenizer, max_tokens=1000, overlong="truncate_right").token_ids) == 1000
    assert tokenizer.encoded < 50_000


@pytest.fixture(scope="module")
def merging() -> PreTrainedTokenizerFast:
    """A tokenizer with merges, and with a token before every text that is no chat."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    raw.train_from_iterator([WORDS[:20_000]], trainer)
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


WORDS = " ".join(
    random.Random(3).choices(["reward", "rewards", "prompt", "tokens", "über", "12345", "a", "an"], k=40_000)
)


@pytest.mark.parametrize("prompt", [WORDS, [{"role": "user", "content": WORDS}]])
@pytest.mark.parametrize("most", [1, 7, 100, 1000])
def test_a_huge_prompt_that_is_cut_at_the_end_has_the_tokens_of_the_whole(
    prompt: Any, most: int, merging: PreTrainedTokenizerFast
) -> None:
    whole = merging.encode(prompt) if isinstance(prompt, str) else None
    if whole is None:
        whole = merging.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert render(row(prompt), merging, max_tokens=most, overlong="truncate_right").token_ids == whole[:most]

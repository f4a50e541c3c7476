"""Tiny random Qwen3 models with a byte-level tokenizer, as ordinary Hugging Face folders."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CALL = ("<tool_call>", "</tool_call>")
"""Tokens around a call of a tool, as Qwen3 writes it."""


def byte_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """256 byte symbols without merges, then the specials: token = byte, end of turn = 258."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    bpe = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(list(SPECIALS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=SPECIALS[2],
        pad_token=SPECIALS[0],
        additional_special_tokens=[SPECIALS[1]],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def _byte_of(symbol: str) -> int:
    """The byte that a symbol of the byte-level alphabet stands for: printable ones are themselves, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return ord(symbol) if ord(symbol) in printable else others[ord(symbol) - 256]


TINY = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
FOR_KERNELS = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Sizes that the engines' kernels on GPUs take."""


def tiny_config(*, tied: bool, vocab_size: int, sizes: Mapping[str, Any] = TINY) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab_size,
        **sizes,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        eos_token_id=258,
        pad_token_id=256,
        bos_token_id=None,
    )


def random_model(
    *, tied: bool, seed: int, dtype: torch.dtype = torch.float32, sizes: Mapping[str, Any] = TINY
) -> Qwen3ForCausalLM:
    """Weights larger than the usual start, so that distributions are far from uniform and versions far apart."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(tiny_config(tied=tied, vocab_size=259, sizes=sizes)).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if "norm" in name else 0.08
            parameter.add_(torch.randn_like(parameter) * scale)
    return model


def save_tiny_model(
    folder: Path,
    *,
    tied: bool,
    seed: int = 0,
    chat_template: str | None = CHATML,
    sizes: Mapping[str, Any] = TINY,
    never_sampled: Sequence[str] = (),
) -> Path:
    """Writes config, tokenizer and float32 weights to `folder` and returns it. `never_sampled`: tokens that the
    tokenizer knows beyond the model's vocabulary."""
    random_model(tied=tied, seed=seed, sizes=sizes).save_pretrained(folder)
    tokenizer = byte_tokenizer(chat_template)
    tokenizer.add_tokens(list(never_sampled))
    tokenizer.save_pretrained(folder)
    return folder


def save_reward_model(folder: Path, *, seed: int = 0, labels: int = 1) -> Path:
    """The same for a random model that gives a text one number for each label."""
    torch.manual_seed(seed)
    config = tiny_config(tied=False, vocab_size=259)
    config.num_labels = labels
    model = Qwen3ForSequenceClassification(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def save_judge_model(folder: Path, reply: str = "Score: 7") -> Path:
    """The same for a language model that says `reply` to everything, when it is greedy: its layers add nothing, and
    each token has one token that follows it. No character of `reply` may come twice."""
    model, tokenizer = random_model(tied=False, seed=0), byte_tokenizer()
    said = [*tokenizer.encode("\n"), *tokenizer.encode(reply), model.config.eos_token_id]
    assert len(set(said)) == len(said), "a token that comes twice would have two that follow it"
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[said[1:]] = model.model.norm(model.model.embed_tokens.weight[said[:-1]])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

"""A model whose answers have lengths of a chosen distribution, whatever engine samples them.

Its first token says how many are to follow, drawn by the model's own probabilities: a lognormal distribution. Each
token after it is the one that counts one less, with a probability of nearly 1, until the end of the turn. All weights
of attention and networks add nothing to the hidden state, but engine and trainer compute with them.
"""

import json
import math
from itertools import pairwise
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from millrace.demo.model import SIZES
from millrace.demo.tokenizer import byte_tokenizer

LIKELY = 60.0
"""Logit of the token that follows."""
SIGMA = math.log(10) / 2.3263478740408408
"""Of a lognormal distribution whose 99th percentile is ten times its median."""


def shares(median: float, longest: int) -> list[float]:
    """Probabilities of the lengths 2 to `longest`; longer answers count as the longest."""

    def below(length: float) -> float:
        return 0.5 * math.erfc(-math.log(length / median) / SIGMA / math.sqrt(2))

    ends = [0.0, *(below(length + 0.5) for length in range(2, longest)), 1.0]
    return [high - low for low, high in pairwise(ends)]


def made_model(folder: Path, median: float, longest: int) -> Path:
    """The model's folder, with a tokenizer and a chat format; float32."""
    counts = [f"<|{left}|>" for left in range(longest - 1)]
    """Tokens by how many of them are to follow; after the last one the turn ends."""
    tokenizer = byte_tokenizer(counts)
    end = tokenizer.convert_tokens_to_ids(str(tokenizer.eos_token))
    (begin,) = tokenizer.encode("\n")
    """The token before an answer, which ends the chat format's prompt."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=longest + 128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
        **SIZES["small"],
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        ids = [int(tokenizer.convert_tokens_to_ids(token)) for token in counts]
        _count_down(model, begin, end, ids, shares(median, longest))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "generation_config.json").read_text()) | {"eos_token_id": end}
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


def _count_down(model: Qwen3ForCausalLM, begin: int, end: int, counts: list[int], likely: list[float]) -> None:
    """`likely`: the probability of each of `counts` as the first token. The first coordinate of the hidden state is
    `begin`'s alone."""
    embedding_vh, head_vh = model.model.embed_tokens.weight, model.lm_head.weight
    size = embedding_vh.shape[1]
    directions_ch = torch.randn(len(counts), size)
    directions_ch[:, 0] = 0.0
    directions_ch /= directions_ch.norm(dim=1, keepdim=True)
    embedding_vh[counts] = directions_ch
    embedding_vh[begin] = 0.0
    embedding_vh[begin, 0] = 1.0
    # The last norm gives every hidden state the length sqrt(size).
    head_vh.zero_()
    head_vh[:, 0] = -LIKELY / math.sqrt(size)
    head_vh[counts, 0] = torch.tensor([math.log(max(share, 1e-20)) for share in likely]) / math.sqrt(size)
    head_vh[counts[:-1], 1:] = directions_ch[1:, 1:] * LIKELY / math.sqrt(size)
    head_vh[end, 1:] = directions_ch[0, 1:] * LIKELY / math.sqrt(size)

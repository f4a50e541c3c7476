"""A tiny model after a short supervised run, so that what it says earns rewards that differ from the first step on."""

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3ForCausalLM

from millrace.demo.model import IGNORED, demonstration
from millrace.demo.tasks import Turn
from millrace.demo.tokenizer import byte_tokenizer
from tests.models import tiny_config

CONVERSATIONS = 16
"""Conversations of a supervised step."""
POSITIONS = 1024
TOKENS = ("<tool_call>", "</tool_call>")
"""Tokens by which calls of tools are found in what the policy says."""


def save_warmed_model(folder: Path, conversation: Callable[[Random], Sequence[Turn]], steps: int) -> Path:
    """Writes a model to `folder` that was trained for `steps` on the turns of the policy in random conversations."""
    torch.manual_seed(0)
    rng, tokenizer = Random(0), byte_tokenizer(TOKENS)
    config = tiny_config(tied=True, vocab_size=len(tokenizer))
    config.update({"max_position_embeddings": POSITIONS, "initializer_range": 0.08})
    model = Qwen3ForCausalLM(config).float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    for _ in range(steps):
        batch = [demonstration(tokenizer, conversation(rng)) for _ in range(CONVERSATIONS)]
        tokens_bt = pad_sequence([torch.tensor(tokens) for tokens, _ in batch], batch_first=True)
        labels_bt = pad_sequence([torch.tensor(labels) for _, labels in batch], True, IGNORED)
        optimizer.zero_grad()
        model(input_ids=tokens_bt, labels=labels_bt).loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

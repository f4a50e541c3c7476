"""The model of benchmarks/tail: its answers have the lengths that were asked for."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from benchmarks.tail.model import made_model, shares


def test_the_99th_percentile_is_ten_times_the_median() -> None:
    likely = shares(100, 1500)
    assert sum(likely) == pytest.approx(1.0) and min(likely) > 0 and len(likely) == 1499
    below = [sum(likely[: length - 1]) for length in (100, 1000)]
    assert below == pytest.approx([0.5, 0.99], abs=0.01)


def test_the_first_token_draws_a_length_and_the_others_count_down(tmp_path: Path) -> None:
    model = Qwen3ForCausalLM.from_pretrained(made_model(tmp_path / "model", 20.0, 200))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Count."}], add_generation_prompt=True, return_dict=False
    )
    counts = [tokenizer.convert_tokens_to_ids(f"<|{left}|>") for left in range(198, -1, -1)]
    with torch.no_grad():
        logprobs_tv = torch.log_softmax(model(torch.tensor([[*prompt, *counts]])).logits[0], dim=-1)
    first_v = logprobs_tv[len(prompt) - 1].exp()
    assert [float(first_v[token]) for token in reversed(counts)] == pytest.approx(shares(20.0, 200), rel=1e-3)
    follows = [*counts[1:], tokenizer.eos_token_id]
    certain = [float(logprobs_tv[len(prompt) + place, token]) for place, token in enumerate(follows)]
    assert min(certain) > math.log(0.9999)

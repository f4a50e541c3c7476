"""The work that this project and its peers are measured on: one model, one list of prompts, one reward.

Nothing here imports millrace, as a peer's environment has none. The model is random: its answers end by chance, so
their lengths are about geometric, with a mean of 450 tokens at a vocabulary of 512, and some reach the bound.
"""

import json
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PROMPTS, ANSWERS = 32, 8
"""Of a step."""
PROMPT_TOKENS, ANSWER_TOKENS, CONTEXT = 64, 3072, 4096
"""At most."""
TOKEN_BUDGET = 16384
"""Of a micro-batch."""
LEARNING_RATE = 1e-6
VOCABULARY = 512
SHAPES = {
    "1.4b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
"""Qwen3 shapes with a vocabulary of 512; the last one is for a try without a GPU."""
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
REWARD = '''"""A number between 0 and 1 that differs between answers, so that every group has a gradient."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return (sum(solution_str.encode()) % 101) / 100
'''


def made_work(folder: Path, shape: str) -> Path:
    """Writes model/, rows.jsonl, train.parquet and reward.py to `folder`, once."""
    if (folder / "done").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = made_tokenizer()
    made_model(folder / "model", shape, tokenizer)
    rows = made_rows()
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD)
    (folder / "done").touch()
    return folder


def made_tokenizer() -> PreTrainedTokenizerFast:
    """A byte tokenizer with a name for each of the 512 tokens: verl masks tokens that its tokenizer does not know."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(symbols)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    core.add_tokens([AddedToken(f"<x{n}>", normalized=False) for n in range(core.get_vocab_size(), VOCABULARY)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    made.chat_template = TEMPLATE
    return made


def made_model(folder: Path, shape: str, tokenizer: PreTrainedTokenizerFast) -> None:
    size = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        head_dim=128,
        max_position_embeddings=2 * CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.02,
        **size,  # type: ignore[arg-type]
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config)
        model.to(torch.bfloat16)  # type: ignore[arg-type]
    with torch.no_grad():  # Logits are as widely spread as at a width of 2,048, so answers are as long.
        model.lm_head.weight.mul_((2048 / size["hidden_size"]) ** 0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def figures(seen: Mapping[int, tuple[float, Mapping[str, float]]], shown: Sequence[str]) -> dict[str, Any]:
    """What a run's steps took. `seen`: of each step the seconds from the beginning until its end, and its metrics;
    `shown`: the metrics whose means are told. The first steps are left out: they compile and fill the engine."""
    order = sorted(seen)
    later = order[2:] if len(order) > 4 else order[1:]
    between = [seen[step][0] - seen[step - 1][0] for step in later]
    tokens = [PROMPTS * ANSWERS * seen[step][1]["response_length/mean"] for step in later]
    values = {name: [seen[step][1][name] for step in later if name in seen[step][1]] for name in shown}
    return {
        "steps": len(order),
        "first_step_s": round(seen[order[0]][0], 1),
        "step_s": [round(seconds, 2) for seconds in between],
        "mean_step_s": round(statistics.fmean(between), 2),
        "tokens_a_second": round(sum(tokens) / sum(between)),
        "of": {name: round(statistics.fmean(found), 4) for name, found in values.items() if found},
    }


def made_rows(count: int = 2048) -> list[dict[str, object]]:
    """Rows with verl's columns."""
    draw, words = random.Random(0), dict[str, None]()
    while len(words) < count:
        words.setdefault("".join(draw.choices("abcdefghij", k=draw.choice((4, 5, 6)))))
    return [
        {
            "data_source": "peers/letters",
            "ability": "letters",
            "prompt": [{"role": "user", "content": f"reverse {word}"}],
            "reward_model": {"style": "rule", "ground_truth": word[::-1]},
            "extra_info": {"index": number, "letters": len(word)},
        }
        for number, word in enumerate(words)
    ]

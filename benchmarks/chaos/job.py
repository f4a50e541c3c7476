"""The job that the faults happen to: a tiny random model, short answers, many small steps, several passes."""

from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from millrace.data.row import PromptRow, write_rows
from tests.models import save_tiny_model

ROWS = 48
REFUSED = frozenset({7, 21, 40})
"""Rows on which the reward function raises: each costs its own group and nothing else."""
PROMPTS_PER_STEP = 4
LEASE_S = 10.0
SEED = 5
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info):
    """The share of vowels."""
    if ground_truth == "refused":
        raise ValueError("this row cannot be scored")
    return sum(letter in ground_truth for letter in solution_str) / max(1, len(solution_str))
'''


def job(folder: Path, max_staleness: int, carried: int = 0) -> dict[str, Any]:
    """A job without an end, and its model, data and reward in `folder`."""
    disable_progress_bar()
    rows = [
        PromptRow(
            index=number,
            data_source="vowels",
            prompt=[{"role": "user", "content": f"say something, take {number}"}],
            ground_truth="refused" if number in REFUSED else "aeiou",
            extra_info={"index": number},
        )
        for number in range(ROWS)
    ]
    write_rows(folder / "train.parquet", rows)
    (folder / "vowels.py").write_text(REWARD)
    return {
        "name": "chaos",
        "output": str(folder / "out"),
        "model": {"path": str(save_tiny_model(folder / "model", tied=True))},
        "data": {"files": [str(folder / "train.parquet")], "max_prompt_tokens": 128, "seed": SEED},
        "reward": {"function": f"{folder / 'vowels.py'}:compute_score", "workers": 1, "timeout_s": 5.0},
        "rollout": {
            "samples_per_prompt": 2,
            "max_response_tokens": 24,
            "dtype": "float32",
            "lease_s": LEASE_S,
            "engine_options": {"max_num_seqs": 8},
        },
        "trainer": {"dtype": "float32", "token_budget": 2048, "optimizer": {"lr": 1e-5}},
        "schedule": {
            "steps": 100_000,
            "prompts_per_step": PROMPTS_PER_STEP,
            "max_staleness": max_staleness,
            "carried_prompts": carried,
            "save_every_steps": 3,
        },
        "deadlines": {"publication_s": 10.0},
        "tracking": {"samples_per_step": 1},
    }

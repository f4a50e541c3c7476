"""A short job of episodes, and what has to hold of it whatever plays them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from millrace.client import Client
from millrace.data.row import PromptRow, write_rows
from millrace.rest import SampleView
from tests.e2e.conftest import adds_up, finished

STEPS, PROMPTS = 2, 2


def asking(job: Mapping[str, Any], asked: str, truths: Sequence[str]) -> dict[str, Any]:
    """The `data` of a job in which each row asks `asked`; the truths take turns."""
    rows = [PromptRow(n, "numbers", [{"role": "user", "content": asked}], truths[n % len(truths)]) for n in range(16)]
    return {"files": [str(write_rows(Path(job["output"]).parent / "asked.parquet", rows))], "max_prompt_tokens": 256}


def trained_samples(
    client: Client,
    job: dict[str, Any],
    model: Path,
    data: dict[str, Any],
    rollout: dict[str, Any],
    episodes: int = 8,
    trajectories: int = 1,
) -> list[SampleView]:
    """All samples of a job of two steps with `data`, `rollout` and so many `episodes` in each group.

    The job ended well, the weights moved, the trainer's probabilities of the sampled tokens are the engine's, and an
    episode is so many `trajectories` whose reward is the one that was trained.
    """
    job["data"] = data
    job["model"]["path"] = str(model)
    sizes = {"samples_per_prompt": episodes, "max_response_tokens": 400, "engine_options": {"max_num_seqs": 16}}
    job["rollout"] |= sizes | rollout
    job["schedule"] |= {"steps": STEPS, "prompts_per_step": PROMPTS, "max_staleness": 0}
    job["tracking"] = {"samples_per_step": PROMPTS * episodes}
    view = finished(client, client.submit(job).id, 480)
    adds_up(client, view, groups_per_step=PROMPTS)

    before = load_file(model / "model.safetensors")
    after = load_file(Path(job["output"]) / f"checkpoints/step-{STEPS}/huggingface/model.safetensors")
    assert max(float((after[name].float() - before[name]).abs().max()) for name in before) > 1e-5, "nothing was learned"
    samples = [sample for sample in client.samples(view.id, limit=200) if sample.purpose == "train"]
    assert len(samples) == STEPS * PROMPTS * episodes * trajectories
    for row in (row for row in client.metrics(view.id) if row.step):
        assert row.values["training/rollout_probs_diff_max"] < 1e-3
        assert row.values["training/rollout_logprobs_diff_max"] < 1e-3
        assert row.values["num_trajectories/mean"] == trajectories, "a turn was made into tokens twice, or not"
        rewards = torch.tensor([earned(sample) for sample in samples if sample.step == row.step])
        assert abs(row.values["critic/rewards/mean"] - trajectories * float(rewards.mean())) < 1e-6
    return samples


def earned(sample: SampleView) -> float:
    """The reward of an episode of one trajectory: that at its end and those of its turns."""
    return (sample.reward or 0.0) + sum(turn.reward for turn in sample.turns)

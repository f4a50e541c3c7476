"""A job whose prompts have images: two ranks train it, vLLM generates, what cannot be used costs its row."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from millrace.cli import app
from millrace.data.row import PromptRow, write_rows
from millrace.lora import WEIGHTS
from tests.e2e.conftest import adds_up, finished
from tests.image_models import language_layers, opened_model, picture, save_image_model

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(600)]
"""test_image_prompts.py of vLLM and test_images.py of both backends hold them to transformers, test_image_rows.py has
the errors."""
CLOSE = 5e-7
"""KL of log-probabilities that differ by 1e-3."""


def rows() -> list[PromptRow]:
    """32 usable rows, every fourth without an image, and four that are not, each in its own way."""
    shown: list[dict[str, Any]] = [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]
    good = [
        PromptRow(
            index=n,
            data_source="vowels",
            prompt=[{"role": "user", "content": shown if n % 4 else f"say something, take {n}"}],
            ground_truth="aeiou",
            images=(picture(n, 60 + 7 * n, 90), picture(n + 100, 50, 70)) if n % 4 else (),
        )
        for n in range(32)
    ]
    damaged = replace(good[1], images=(good[1].images[0], good[1].images[1][:300]))
    large = replace(good[1], images=(good[1].images[0], picture(7, 400, 300)))
    several = replace(good[1], prompt=[{"role": "user", "content": shown * 2}], images=good[1].images * 2)
    token = {"type": "text", "text": "<|image_pad|>"}
    special = replace(good[1], prompt=[{"role": "user", "content": [*shown, token]}])
    return [good[0], damaged, large, several, special, *good[1:]]


LORA = {"rank": 8, "alpha": 16}
TOWER = {"train_tower": True}
TENSOR = {"backend": "megatron", "backend_options": {"tensor_parallel": 2}}
PIPELINE = {"backend": "megatron", "backend_options": {"pipeline_parallel": 2, "first_stage_layers": 1}}
DEEPSTACK = {"backend": "megatron", "backend_options": {"pipeline_parallel": 2, "first_stage_layers": 2}}


@pytest.mark.parametrize(
    ("lora", "kind", "trainer"),
    [
        (None, "qwen2_5_vl", {}),
        (None, "qwen2_5_vl", TOWER),
        (LORA, "qwen2_5_vl", {}),
        ({**LORA, "merge": True}, "qwen2_5_vl", {}),
        (None, "qwen3_vl", {}),
        (None, "qwen3_vl", TOWER),
        (LORA, "qwen3_vl", {}),
        (None, "qwen3_5", {}),
        (None, "qwen3_5", TOWER),
        (LORA, "qwen3_5", {}),
        (None, "qwen3_5_moe", TOWER),
        (LORA, "qwen3_5_moe", {}),
        (None, "qwen3_vl_moe", TOWER),
        (LORA, "qwen3_vl_moe", {}),
        (None, "qwen2_5_vl", TENSOR),
        (LORA, "qwen2_5_vl", PIPELINE),
        (None, "qwen3_5", PIPELINE),
        (None, "qwen3_vl", TENSOR),
        (LORA, "qwen3_vl", DEEPSTACK),
    ],
)
def test_images_are_trained_and_bad_ones_cost_their_rows(start, job, tmp_path, lora, kind, trainer):
    folder = save_image_model(tmp_path / "model", kind=kind)
    write_rows(tmp_path / "images.parquet", rows())
    job["model"] |= {"path": str(folder), "lora": lora}
    job["trainer"] |= trainer
    limits = {"max_per_prompt": 2, "max_pixels": 100_000}
    job["data"] = {
        "files": [str(tmp_path / "images.parquet")],
        "max_prompt_tokens": 200,
        "images": limits,
        "shuffle": False,
    }
    job["rollout"] |= {"max_response_tokens": 40, "engine_options": {"max_num_seqs": 16}}
    job["schedule"] |= {"steps": 8, "prompts_per_step": 4, "max_staleness": 1}
    stack = start(replicas=1, ranks=2, engine="vllm")
    client = stack.client()
    done = finished(client, client.submit(job).id, 300)
    adds_up(client, done, groups_per_step=4)
    reasons = {reason: count for reason, count in client.ledger(done.id).reasons.items() if reason != "job_succeeded"}
    assert reasons == {"bad_row": 1, "bad_prompt": 3}
    metrics = [row.values for row in client.metrics(done.id) if row.step]
    assert all(row["actor/grad_norm"] > 0 for row in metrics)
    apart = [row["rollout_corr/k3_kl/same_version"] for row in metrics if "rollout_corr/k3_kl/same_version" in row]
    assert apart and max(apart) < CLOSE

    if lora is not None:
        layers = {name.rpartition(".lora_")[0] for name in load_file(f"{done.checkpoint}/adapter/{WEIGHTS}")}
        assert layers == {f"base_model.model.{layer}" for layer in language_layers(opened_model(folder))}
    told = CliRunner().invoke(app, ["export", done.checkpoint, str(tmp_path / "exported")])
    assert told.exit_code == 0, told.output
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "exported"))
    assert before.keys() == after.keys()
    moved = [name for name, tensor in after.items() if not torch.equal(tensor, before[name])]
    assert any("self_attn.q_proj" in name for name in moved)
    assert [name for name in moved if "visual" in name] == [
        name for name in after if trainer is TOWER and "visual" in name
    ]

"""`millrace plan`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millrace.cli import app
from tests.planner.jobs import PRESETS

JOB = str(PRESETS / "qwen3-30b-a3b-8gpu.yaml")
CLUSTER = ("--trainer-gpus", "8", "--rollout-gpus", "8", "--gpu", "h20")


def run(*options: str) -> str:
    result = CliRunner().invoke(app, ["plan", JOB, *options])
    assert result.exit_code == 0, result.output + result.stderr
    return result.output


def test_a_plan_in_words_and_as_json_say_the_same() -> None:
    words, told = run(*CLUSTER), json.loads(run(*CLUSTER, "--json"))
    for part in ("optimizer", "keys and values", "generation", "update", "publication", "MFU", "idle", "balanced"):
        assert part in words, part
    assert told["fits"] and told["exceeded"] == []
    assert f"MFU {told['mfu']:.2f}" in words and f"{told['cost_per_million_tokens']:.2f}" in words
    assert told["seconds"]["update"]["total"] == pytest.approx(
        sum(value for cause, value in told["seconds"]["update"].items() if cause != "total")
    )


def test_settings_that_would_make_it_fit_are_named() -> None:
    kept = ("--set", "trainer.backend_options.recompute.granularity=none")
    told = json.loads(run(*CLUSTER, *kept, "--json"))
    assert told["exceeded"] == ["trainer_memory"]
    assert "trainer.activation_recompute" in told["settings"]
    assert told["memory"]["trainer_peak_with_settings"] < told["memory"]["trainer_peak"]
    assert "does not fit: memory of the trainer's GPUs" in run(*CLUSTER, *kept)


def test_a_search_prints_layouts_and_what_the_first_one_needs() -> None:
    options = ("--rollout-gpus", "8", "--gpu", "h20", "--search")
    words, told = run(*options), json.loads(run(*options, "--json"))
    first = told["layouts"][0]
    assert words.startswith(f"{told['trainer_gpus']} GPUs of the trainer and 8 of replicas; layouts that fit: ")
    tensor = first["settings_to_change"]["trainer.backend_options.tensor_parallel"]
    assert first["plan"]["fits"] and f"--set trainer.backend_options.tensor_parallel={tensor}" in words
    assert "virtual_pipeline" not in words  # it has its default
    refused = CliRunner().invoke(app, ["plan", JOB, *options, "--trainer-gpus", "1"])
    assert refused.exit_code == 1 and "--trainer-gpus: 1: no layout of this backend fits." in refused.stderr


def test_mistakes_have_field_value_reason_and_fix() -> None:
    for options, told in (
        (("--gpu", "h2"), '--gpu: "h2": is no known kind of GPU and no file.'),
        (("--model", "qwen9"), '--model: "qwen9": is no model whose sizes are known.'),
        (("--mean-response", "9000"), "--mean-response: 9000.0: is more than the longest that the job allows, 8192."),
        (("--engine", "vlm"), "--engine: vlm: there is no such engine."),
    ):
        result = CliRunner().invoke(app, ["plan", JOB, *options])
        assert result.exit_code == 1 and told in result.stderr and "Fix: " in result.stderr, result.stderr


def test_it_needs_neither_torch_nor_an_engine(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules.update(torch=None, vllm=None, transformers=None); from millrace.cli import app; app()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", JOB, *CLUSTER, "--json"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(PRESETS.parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fits"]

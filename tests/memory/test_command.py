"""`millrace validate --memory`."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.shapes import config_of
from millrace.cli import app
from millrace.megatron.architectures.published import shape_of


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config_of(shape_of("qwen3-8b"))))
    tree = {
        "name": "memory",
        "output": str(tmp_path / "output"),
        "model": {"path": str(tmp_path)},
        "data": {"procedural": "reasoning_gym:spell_backward"},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "job.yaml"


def validated(job: Path, *options: str) -> list[str]:
    found = CliRunner().invoke(app, ["validate", str(job), "--fields-only", "--memory", *options])
    return [" ".join(line.split()) for line in found.output.splitlines()]


def test_a_job_that_does_not_fit_is_told_what_makes_it_fit(job_file: Path) -> None:
    lines = validated(job_file, "--gpu-memory", "80")
    assert "optimizer – 61.0 GiB 61.0 GiB 61.0 GiB" in lines
    assert any(line.startswith("does not fit: 204.2 GiB of 80.0 GiB") for line in lines), lines
    assert any(line.startswith("together (") and line.endswith("and fits then") for line in lines), lines
    assert not any("without other settings" in line for line in lines)  # activations alone are too large


def test_a_job_that_fits(job_file: Path) -> None:
    lines = validated(job_file, "--gpu-memory", "141", "--trainer-gpus", "8")
    assert any(line.startswith("fits: ") for line in lines)
    assert not any("does not fit" in line for line in lines), lines


def test_an_engine_or_a_number_of_gpus_that_is_not_possible(job_file: Path) -> None:
    assert any("--engine: other: there is no such engine." in line for line in validated(job_file, "--engine", "other"))
    options = ["--set", "trainer.backend=megatron", "--set", "trainer.backend_options.tensor_parallel=2"]
    told = " ".join(validated(job_file, *options, "--trainer-gpus", "3"))
    assert "3 GPUs of the trainer: the job's options need a multiple of 2." in told

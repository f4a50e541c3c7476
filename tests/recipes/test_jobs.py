"""Every recipe's job is valid, fits its GPUs, and passes `millrace validate` with a folder of the published shape."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner

from benchmarks.shapes import config_of
from millrace.admission import choices
from millrace.backends.megatron import parse as megatron_options
from millrace.cli import app
from millrace.errors import InvalidJob
from millrace.megatron.architectures import read_shape
from millrace.megatron.architectures.published import PUBLISHED
from millrace.megatron.rules import broken_rules
from millrace.spec import load
from recipes.catalogue import HERE, RECIPES, Recipe, recipe
from recipes.data_sets import DATA_SETS, converted
from tests.hub_server import COMMIT, Repository, serving
from tests.image_models import save_processor
from tests.models import byte_tokenizer, save_tiny_model
from tests.recipes.published import FILES, gsm8k_file

COVERING = ("qwen3-8b-megatron",)
"""Checked by `make test`; the others by `make test-all`, which trains some, too (`tests/e2e/test_recipes.py`)."""
ALL = [pytest.param(each, marks=[] if each in COVERING else pytest.mark.matrix) for each in RECIPES]


def model_folder(folder: Path, shape: str) -> Path:
    """Config of the published sizes, a tokenizer, and a processor of images if the model takes them. No weights are
    read before a trainer loads them."""
    folder.mkdir()
    config = config_of(PUBLISHED[shape])
    if PUBLISHED[shape].tower is None:
        byte_tokenizer().save_pretrained(folder)
    else:
        config |= save_processor(folder)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("each", RECIPES.values(), ids=list(RECIPES))
def test_a_recipe_is_valid_and_fits_its_gpus(each: Recipe, tmp_path: Path) -> None:
    spec = load(each.file)
    choices.check(spec)
    assert spec.name == each.name and spec.output == f"/data/runs/{each.name}"
    assert spec.data.files == [f"/data/{each.data}/train.parquet"]
    assert f"on {each.gpus} trainer GPU" in each.file.read_text().splitlines()[0]
    assert spec.rollout.engine_options["max_model_len"] == (
        spec.data.max_prompt_tokens + spec.rollout.max_response_tokens
    )
    if spec.trainer.backend == "megatron":
        (tmp_path / "config.json").write_text(json.dumps(config_of(PUBLISHED[each.shape])))
        options = megatron_options(spec.trainer.backend_options)
        assert broken_rules(options, read_shape(tmp_path), each.gpus, cuda=True) == []


def test_every_file_of_the_folder_is_a_recipe_that_is_found_by_its_name() -> None:
    assert {file.stem for file in HERE.glob("*.yaml")} == set(RECIPES)
    with pytest.raises(InvalidJob, match=r"choose one of qwen3-0\.6b-fsdp2"):
        recipe("qwen3-0.6b")


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_validate_accepts_a_recipe_with_the_published_config(name: str, tmp_path: Path) -> None:
    chosen = recipe(name)
    source = str(FILES[chosen.data](tmp_path / "published.parquet"))
    for target in (chosen.train_file(tmp_path), chosen.test_file(tmp_path)):
        converted(source, DATA_SETS[chosen.data].rows, target)
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(chosen.tree(tmp_path, str(model_folder(tmp_path / "model", chosen.shape)))))
    done = CliRunner().invoke(app, ["validate", str(job)])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "model, data and reward are usable" in " ".join(done.output.split())


@pytest.mark.slow
@pytest.mark.matrix  # the test above has what is prepared, tests/test_hub.py models by a name of the hub
def test_a_job_is_prepared_with_a_model_of_the_hub_and_with_other_values(tmp_path: Path) -> None:
    source = str(gsm8k_file(tmp_path / "published.parquet"))
    argv = [sys.executable, "-m", "recipes", "prepare", "qwen3-0.6b-fsdp2", str(tmp_path), "--model", "someone/tiny"]
    argv += ["--train", source, "--test", source, "--set", "data.max_prompt_tokens=300"]
    argv += ["--set", "rollout.max_response_tokens=99"]
    files = {file.name: file.read_bytes() for file in save_tiny_model(tmp_path / "tiny", tied=True).iterdir()}
    with serving() as hub:
        hub.repositories = {"models/someone/tiny": Repository({COMMIT: files}, {"main": COMMIT})}
        found = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(argv, env={**os.environ, **found}, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    spec = load(tmp_path / "qwen3-0.6b-fsdp2.yaml")
    assert (spec.model.path, spec.data.max_prompt_tokens, spec.rollout.max_response_tokens) == ("someone/tiny", 300, 99)
    assert "model.safetensors" not in hub.downloads()

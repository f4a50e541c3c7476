"""Every ready job spec is valid, and its topology fits the model that it names at the size that its name says."""

import json
import re
from pathlib import Path

import pytest

from millrace.backends.megatron import parse
from millrace.megatron.architectures import read_shape
from millrace.megatron.rules import broken_rules
from millrace.spec import load
from millrace.spec.checking import choices
from tests.megatron import configs

PRESETS = Path(__file__).parents[2] / "presets"
FILES = sorted(PRESETS.glob("*.yaml"))
QWEN3_235B_A22B = {
    **configs.QWEN3_30B_A3B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
MODELS = {
    "qwen3-30b-a3b": configs.QWEN3_30B_A3B,
    "qwen3-235b-a22b": QWEN3_235B_A22B,
    "deepseek-v3": configs.DEEPSEEK_V3,
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_ready_job_is_valid_and_fits_its_cluster(file: Path, tmp_path: Path) -> None:
    spec = load(file)
    choices.check(spec)
    found = re.fullmatch(r"(.+)-(\d+)gpu", file.stem)
    assert found is not None and found[1] == spec.name
    first = file.read_text().splitlines()[0]
    trainer = re.search(r"on (\d+) trainer GPUs", first)
    assert trainer is not None and found[2] in (trainer[1], *re.findall(r"(\d+) on two hosts", first))
    if spec.trainer.backend == "megatron":
        (tmp_path / "config.json").write_text(json.dumps(MODELS[spec.name]))
        options = parse(spec.trainer.backend_options)
        assert broken_rules(options, read_shape(tmp_path), int(trainer[1]), cuda=True) == []


def test_the_page_lists_every_file() -> None:
    page = (PRESETS / "README.md").read_text()
    assert set(re.findall(r"\]\(([\w.-]+\.yaml)\)", page)) == {file.name for file in FILES}

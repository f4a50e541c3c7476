"""Checkpoints: saved by ranks of one topology, read by two of another; Hugging Face folders."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.trainer.checkpoints import exported
from tests.services.trainer.backends.megatron import tiny
from tests.services.trainer.backends.megatron.conftest import MATRIX, RESUMED, SAVED
from tests.services.trainer.backends.megatron.launch import launch
from tests.services.trainer.backends.megatron.plain import Run, stored, train
from tests.services.trainer.checkpoints.saved import assert_same_files

Ranks = Callable[..., tuple[Any, Path]]

pytestmark = pytest.mark.timeout(700)
"""The first test of each number of ranks waits for their launch."""


WRITTEN = [
    pytest.param(count, name, marks=[pytest.mark.matrix] * (name in MATRIX[count]), id=name)
    for count, names in SAVED.items()
    for name in names
]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.matrix] * (name in MATRIX[2])) for name in RESUMED]
)
def test_goes_on_in_another_topology_as_if_nothing_had_happened(
    name: str, ranks: Ranks, plain: Callable[[str], Run]
) -> None:
    answers, folder = ranks(2, name)
    (kind,) = (kinds[RESUMED[name][0]] for kinds in SAVED.values() if RESUMED[name][0] in kinds)
    answer, expected = answers["train"][name], plain(kind)
    assert answer["updates"] == 2
    assert answer["losses"] == pytest.approx(expected.losses[1:], rel=2e-5)
    assert answer["norms"] == pytest.approx(expected.norms[1:], rel=2e-5)
    for tensor, weights in load_file(folder / f"{name}.safetensors").items():
        torch.testing.assert_close(weights, expected.weights[tensor].float(), atol=1e-4, rtol=0, msg=tensor)


@pytest.mark.parametrize(("count", "name"), WRITTEN)
def test_a_checkpoint_has_an_ordinary_model_folder_in_it(count: int, name: str, ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(count, name)[1] / "checkpoints" / name
    folder = saved / "huggingface"
    exported.write(saved, tmp_path / "exported")
    assert_same_files(tmp_path / "exported", folder)
    loaded = stored(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    for tensor, weights in train(tiny.random_model(SAVED[count][name]).train(), steps=1).weights.items():
        torch.testing.assert_close(loaded[tensor], weights, atol=1e-4, rtol=0, msg=tensor)


def test_nothing_half_written_is_left(ranks: Ranks) -> None:
    folder = ranks(2)[1] / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == sorted(SAVED[2])


OTHER = os.environ.get("MILLRACE_OTHER_MEGATRON", "")


@pytest.mark.slow
@pytest.mark.skipif(
    not OTHER, reason="MILLRACE_OTHER_MEGATRON is no Python with another megatron-core: make test-megatron"
)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen3", {"tensor_parallel": 2}),
        ("deepseek_v3", {"pipeline_parallel": 2}),
        ("qwen3_moe", {"expert_parallel": 2}),
    ],
)
def test_goes_on_from_a_checkpoint_of_another_megatron_core(
    kind: str, options: dict[str, Any], models: dict[str, Path], plain: Callable[[str], Run], tmp_path: Path
) -> None:
    saved, case = str(tmp_path / "checkpoint"), {"model": str(models[kind])}
    calls = {"train": {"cases": {"saved": {**case, "steps": 1, "save_after": 1, "save": saved}}}}
    command = [OTHER, "-m", "tests.services.trainer.backends.megatron.on_ranks", str(tmp_path), json.dumps(calls)]
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "PYTHONPATH")}
    subprocess.run(command, cwd=Path(__file__).parents[5], env=alone, check=True, timeout=110)
    resumed = {**case, "options": options, "resume": saved, "steps": 1}
    answer = launch(2, tmp_path / "resumed", timeout_s=110, train={"cases": {"resumed": resumed}})["train"]["resumed"]
    expected = plain(kind)
    assert answer["updates"] == 2
    assert answer["losses"] == pytest.approx(expected.losses[1:], rel=2e-5)
    assert answer["norms"] == pytest.approx(expected.norms[1:], rel=2e-5)

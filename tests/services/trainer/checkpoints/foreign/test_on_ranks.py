"""Both backends start from what Megatron-Core and FSDP2 wrote themselves on two ranks, as from the Hugging Face folder:
bit for bit the same weights, and the same log-probabilities. What is exported, Megatron-Core and torch load."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.services.trainer.backends.megatron import tiny
from tests.services.trainer.backends.megatron.launch import launch, once

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(700)]
"""test_writing.py has all kinds and both forms on one rank."""

Written = dict[str, tuple[str, str, dict[str, Any]]]
"""What is written: the model's kind, the backend and its options."""
WRITTEN: Written = {
    "megatron qwen2": ("qwen2", "megatron", {}),
    "megatron qwen3_moe": ("qwen3_moe", "megatron", {"tensor_parallel": 2}),
    "fsdp2 qwen3_moe": ("qwen3_moe", "fsdp2", {}),
}
MATRIX: Written = {
    "megatron mixtral": ("mixtral", "megatron", {"expert_parallel": 2}),
    "megatron deepseek_v3": ("deepseek_v3", "megatron", {"tensor_parallel": 2}),
    "fsdp2 qwen2": ("qwen2", "fsdp2", {}),
    "fsdp2 mixtral": ("mixtral", "fsdp2", {}),
    "fsdp2 deepseek_v3": ("deepseek_v3", "fsdp2", {}),
}
"""Other names in the same forms. `WRITTEN` covers those: layers stacked and alone, experts, padding, tied heads."""
READERS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp2": ("fsdp2", {}),
    "megatron PP2": ("megatron", {"pipeline_parallel": 2}),
}
APART = " apart"
"""Megatron's other form: each layer, expert and projection by itself."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], dict[str, Any]]:
    """What the ranks tell of `MATRIX`, or of `WRITTEN`."""
    return once(lambda matrix: _launched(MATRIX if matrix else WRITTEN, tmp_path_factory.mktemp("foreign")))


def _launched(written: Written, root: Path) -> dict[str, Any]:
    for kind in {kind for kind, _, _ in written.values()}:
        tiny.save(kind, root / kind)
        (root / f"{kind} config").mkdir()
        shutil.copyfile(root / kind / "config.json", root / f"{kind} config" / "config.json")
    write, read = {}, {}
    for name, (kind, backend, options) in written.items():
        forms = [name, name + APART] if backend == "megatron" else [name]
        write[name] = {"model": str(root / kind), "backend": backend, "options": options}
        write[name] |= {"to": [str(root / form) for form in forms]}
        for form in forms:
            for reader, (reading, how) in READERS.items():
                case = {"model": str(root / f"{kind} config"), "weights": str(root / form), "truth": str(root / kind)}
                read[f"{form} by {reader}"] = {**case, "backend": reading, "options": how}
    export = {name: {**case, "to": str(root / f"{name} exported")} for name, case in write.items()}
    module = "tests.services.trainer.checkpoints.foreign.on_ranks"
    calls = json.dumps({"write": {"cases": write}, "read": {"cases": read}, "exported": {"cases": export}})
    return launch(2, root / "ranks", module=module, arguments=calls)


def forms(written: Written) -> list[str]:
    return [form for name in written for form in ([name, name + APART] if name.startswith("megatron") else [name])]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "form", [*forms(WRITTEN), *(pytest.param(form, marks=pytest.mark.matrix) for form in forms(MATRIX))]
)
def test_starts_as_from_the_folder(form: str, reader: str, answers: Callable[[bool], dict[str, Any]]) -> None:
    writer = form.removesuffix(APART)
    found = answers(writer in MATRIX)
    assert found["read"][f"{form} by {reader}"]["changed"] == []
    expected = found["write"][writer]
    assert found["read"][f"{form} by {reader}"]["logprobs"] == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("name", [*WRITTEN, *(pytest.param(name, marks=pytest.mark.matrix) for name in MATRIX)])
def test_what_is_exported_is_loaded_by_their_own_functions(
    name: str, answers: Callable[[bool], dict[str, Any]]
) -> None:
    assert answers(name in MATRIX)["exported"][name] == []

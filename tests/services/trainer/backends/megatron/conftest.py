"""Model folders and their plain training, one launch for each number of ranks, and a trainer of two ranks."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fp8 import save_quantized
from tests.hybrid_models import KINDS as RECURRENT
from tests.services.trainer.backends.megatron import tiny
from tests.services.trainer.backends.megatron.launch import launch, once
from tests.services.trainer.backends.megatron.plain import Run, train
from tests.services.trainer.coordinator import coordinator
from tests.services.trainer.process import TwoRanks, trainer

KINDS = ("qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "moonlight", "qwen2_5_vl")
EVERY = (*KINDS, "qwen3_vl", *RECURRENT)
"""With those that test_vllm.py here has not: their tests in vLLM are of its engine."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind → model folder."""
    root = tmp_path_factory.mktemp("models")
    for kind in EVERY:
        tiny.save(kind, root / kind)
    return {kind: root / kind for kind in EVERY}


@pytest.fixture(scope="session")
def plain() -> Callable[..., Run]:
    """Kind → two steps of plain training."""
    return functools.cache(lambda kind, **how: train(tiny.random_model(kind).train(), steps=2, **how))


@pytest.fixture(scope="session")
def fp8_models(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model deepseek_v3 with FP8 weights, and with the same weights in float32."""
    root = tmp_path_factory.mktemp("fp8")
    found = {"fp8": root / "fp8", "fp8 dequantized": root / "plain"}
    save_quantized(models["deepseek_v3"], *found.values())
    return found


def cases_of(models: dict[str, Path], asked: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for name, (kind, options) in asked.items():
        told = name.startswith("told")
        cases[name] = {"model": str(models[kind]), "options": options, "told": told, "reference": told}
    return cases


ONE: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in EVERY},
    "recompute full": ("qwen3_moe", {"recompute": {"granularity": "full"}}),
    "recompute selective": ("qwen3_moe", {"recompute": {"granularity": "selective", "modules": ["core_attn", "moe"]}}),
    "logits in small chunks": ("qwen3", {"logprob_chunk_tokens": 16}),
    "own optimizer state": ("qwen3_moe", {"distributed_optimizer": False}),
    "gradients released": ("qwen3_moe", {"release_gradients": True}),
    "parameters in host memory": ("qwen3_moe", {"offload_parameters": True}),
    "told which experts": ("qwen3_moe", {"recompute": {"granularity": "full"}}),
}
"""In those whose name begins so, tokens go where a batch tells, as an engine would."""
BALANCE = 0.05
BALANCED = {"load_balancing": "aux_loss", "aux_loss_coefficient": BALANCE}
OTHERWISE: dict[str, tuple[str, dict[str, Any]]] = {
    "balanced": ("qwen3_moe", {"experts": BALANCED}),
    "router kept": ("qwen3_moe", {"experts": {"train_router": False}}),
    "bias moved": ("moonlight", {"experts": {"bias_update_rate": 0.01}}),
}
"""Cases of one rank that train something else than the plain loss."""
TWO: dict[str, tuple[str, dict[str, Any]]] = {
    "TP2": ("qwen3", {"tensor_parallel": 2}),
    "TP2 without sequence parallelism": ("qwen3", {"tensor_parallel": 2, "sequence_parallel": False}),
    "TP2 tied": ("qwen2", {"tensor_parallel": 2}),
    "PP2": ("qwen3", {"pipeline_parallel": 2}),
    "PP2 uneven": ("qwen3", {"pipeline_parallel": 2, "first_stage_layers": 1}),
    "VPP2 tied": ("qwen2", {"pipeline_parallel": 2, "virtual_pipeline": 2, "release_gradients": True}),
    "DP2": ("qwen3", {}),
    "CP2": ("qwen3", {"context_parallel": 2}),
    "DP2 own optimizer state": ("qwen3", {"distributed_optimizer": False}),
    "MoE EP2": ("qwen3_moe", {"expert_parallel": 2}),
    "MoE EP2 own optimizer state": ("qwen3_moe", {"expert_parallel": 2, "distributed_optimizer": False}),
    "MoE TP2": ("qwen3_moe", {"tensor_parallel": 2}),
    "MoE TP2 EP2": ("qwen3_moe", {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1}),
    "MoE PP2": ("qwen3_moe", {"pipeline_parallel": 2}),
    "MoE VPP2": ("qwen3_moe", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "MoE DP2": ("qwen3_moe", {}),
    "balanced PP2": ("qwen3_moe", {"pipeline_parallel": 2, "experts": BALANCED}),
    "told, PP2": ("qwen3_moe", {"pipeline_parallel": 2}),
    "told, TP2 EP2": ("qwen3_moe", {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1}),
    "MLA TP2": ("deepseek_v3", {"tensor_parallel": 2}),
    "MLA EP2": ("deepseek_v3", {"expert_parallel": 2}),
    "GDN TP2": ("qwen3_next", {"tensor_parallel": 2}),
    "GDN EP2": ("qwen3_5_moe", {"expert_parallel": 2}),
    "GDN PP2": ("qwen3_5_text", {"pipeline_parallel": 2, "first_stage_layers": 1}),
    "MLA PP2": ("moonlight", {"pipeline_parallel": 2, "last_stage_layers": 1}),
}
FOUR: dict[str, tuple[str, dict[str, Any]]] = {
    "TP2 PP2": ("qwen3", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "TP2 PP2 tied": ("qwen2", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "TP4 with two key-value heads": ("qwen3", {"tensor_parallel": 4}),
    "MoE TP2 PP2": ("qwen3_moe", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "MoE TP2 EP2 ETP2": (
        "qwen3_moe",
        {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 2, "distributed_optimizer": False},
    ),
    "GDN TP2 PP2": ("qwen3_next", {"tensor_parallel": 2, "pipeline_parallel": 2, "recompute": {"granularity": "full"}}),
    "MLA TP2 PP2 VPP2 EP2": (
        "deepseek_v3",
        {
            "tensor_parallel": 2,
            "pipeline_parallel": 2,
            "virtual_pipeline": 2,
            "expert_parallel": 2,
            "expert_tensor_parallel": 1,
        },
    ),
}


SAVED: dict[int, dict[str, str]] = {
    2: {"MoE EP2": "qwen3_moe", "GDN TP2": "qwen3_next", "MLA PP2": "moonlight"},
    4: {
        "MoE TP2 PP2": "qwen3_moe",
        "GDN TP2 PP2": "qwen3_next",
        "TP2 PP2 tied": "qwen2",
        "MLA TP2 PP2 VPP2 EP2": "deepseek_v3",
    },
}
"""Number of ranks → cases that save a checkpoint after their first update, and the kinds of their models."""
OF_FOUR: dict[str, tuple[str, dict[str, Any]]] = {
    "resumed MoE EP2": ("MoE TP2 PP2", {"expert_parallel": 2}),
    "resumed MoE DP2 own optimizer state": ("MoE TP2 PP2", {"distributed_optimizer": False}),
    "resumed TP2 tied": ("TP2 PP2 tied", {"tensor_parallel": 2}),
    "resumed PP2 tied": ("TP2 PP2 tied", {"pipeline_parallel": 2}),
    "resumed MLA DP2 of four": ("MLA TP2 PP2 VPP2 EP2", {}),
    "resumed GDN EP2 of four": ("GDN TP2 PP2", {"expert_parallel": 2}),
}
RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "resumed MoE TP2": ("MoE EP2", {"tensor_parallel": 2}),
    "resumed GDN EP2": ("GDN TP2", {"expert_parallel": 2}),
    "resumed MLA DP2": ("MLA PP2", {}),
    **OF_FOUR,
}
"""Cases of two ranks that go on from one of those, of two ranks or of four: the saved case, and options."""
MATRIX: dict[int, set[str]] = {
    1: set(),
    2: {
        "TP2",
        "PP2",
        "PP2 uneven",
        "DP2",
        "MoE EP2 own optimizer state",
        "MoE TP2",
        "MoE TP2 EP2",
        "MoE PP2",
        "MoE VPP2",
        "MoE DP2",
        "MLA TP2",
        "MLA EP2",
        "GDN EP2",
        *OF_FOUR,
    },
    4: set(FOUR),
}
"""Number of ranks → cases for `make test-all`: each combines a model and options that other cases have. They are
launched by themselves."""


@pytest.fixture(scope="session")
def ranks(
    models: dict[str, Path], fp8_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Any, Path]]:
    """Number of ranks → what `on_ranks` answers of that number's cases, and the folder of weights and checkpoints. With
    the name of a case in MATRIX: of the cases in MATRIX."""

    def run(count: int, case: str = "") -> tuple[Any, Path]:
        return launched(count, case in MATRIX[count])

    @once
    def launched(count: int, matrix: bool) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp(f"ranks-{count}")
        cases = cases_of(models, {1: ONE, 2: TWO, 4: FOUR}[count])
        for name in SAVED.get(count, {}):
            cases[name] |= {"save_after": 1, "save": str(folder / "checkpoints" / name)}
        if count == 2:
            saved = launched(4, True)[1] if matrix else folder
            cases |= _resumed(models, SAVED[4 if matrix else 2], saved)
        cases = {name: case for name, case in cases.items() if (name in MATRIX[count]) == matrix}
        calls: dict[str, Any] = {"train": {"cases": cases}}
        if count == 1:
            cases |= cases_of(models, OTHERWISE)
            cases |= {name: {"model": str(path), "reference": True} for name, path in fp8_models.items()}
            cases["bias moved"]["break_off"] = True
            calls["train"]["cases"] = {**_fsdp2(models), **cases, **_bfloat16(models)}
            calls["head"] = calls["context_parallel_packing"] = {}
            calls["against_mbridge"] = {"models": {kind: str(path) for kind, path in models.items()}}
        if count == 2 and not matrix:
            calls["left_behind"] = {}
        return launch(count, folder, **calls), folder

    return run


def _resumed(models: dict[str, Path], kinds: dict[str, str], saved: Path) -> dict[str, Any]:
    """The cases that go on from checkpoints of cases with these kinds of models, in the folder `saved`."""
    cases = {}
    for name, (source, options) in RESUMED.items():
        if source in kinds:
            model, checkpoint = str(models[kinds[source]]), str(saved / "checkpoints" / source)
            cases[name] = {"model": model, "options": options, "resume": checkpoint, "steps": 1}
    return cases


def _fsdp2(models: dict[str, Path]) -> dict[str, Any]:
    """The other backend, before Megatron is imported."""
    return {f"fsdp2 {kind}": {"model": str(models[kind]), "backend": "fsdp2"} for kind in ("qwen3", "qwen3_moe")}


def _bfloat16(models: dict[str, Path]) -> dict[str, Any]:
    return {
        f"bfloat16 {kind}": {"model": str(models[kind]), "dtype": "bfloat16", "export": "bfloat16", "reference": True}
        for kind in ("qwen3", "deepseek_v3")
    }


TOPOLOGIES: dict[str, dict[str, Any]] = {
    "TP2": {"tensor_parallel": 2},
    "PP2": {"pipeline_parallel": 2},
    "DP2": {},
}
"""Options of two ranks."""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    """A trainer of two ranks, configured for job after job. Of a file: ranks that wait take a twentieth of a core."""
    log = tmp_path_factory.mktemp("two") / "log"
    with coordinator() as served, trainer(served, log, ranks=2) as running:
        yield TwoRanks(running, served)

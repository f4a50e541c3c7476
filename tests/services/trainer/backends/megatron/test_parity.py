"""Every topology trains like Hugging Face's model with torch's AdamW on the same batch: float32, two updates.

Tolerances: log-probabilities 2e-5, the loss and the gradient's norm 2e-5 of their size, weights 1e-4 (a hundredth of
the learning rate). In bfloat16 a few hundredths.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.services.trainer.backends.megatron.conftest import BALANCE, EVERY, FOUR, MATRIX, ONE, OTHERWISE, TWO
from tests.services.trainer.backends.megatron.plain import Run

FSDP2 = {f"fsdp2 {kind}": (kind, {}) for kind in ("qwen3", "qwen3_moe")}
DENSE = ("qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl", "qwen3_5_text", "qwen3_5")
"""Models without experts."""
CASES = {1: {**ONE, **FSDP2, "balanced": OTHERWISE["balanced"]}, 2: TWO, 4: FOUR}
ALL = [(count, name) for count, cases in CASES.items() for name in cases]
ON_RANKS = pytest.mark.parametrize(
    ("count", "name"),
    [
        pytest.param(count, name, marks=[pytest.mark.matrix] * (name in MATRIX[count]), id=f"{count} ranks, {name}")
        for count, name in ALL
    ],
)
Ranks = Callable[..., tuple[Any, Path]]

pytestmark = pytest.mark.timeout(700)
"""The first test of each number of ranks waits for their launch."""


def test_what_is_left_to_make_test_all_only_combines() -> None:
    """Each model and each option of a case in MATRIX is one of a case that `make test` has. Of four ranks each option
    that is a number may be another number."""
    kept = [CASES[count][name] for count, name in ALL if name not in MATRIX[count]]
    models, options = {kind for kind, _ in kept}, [item for _, chosen in kept for item in chosen.items()]
    numbers = {name for name, value in options if isinstance(value, int)}
    for count, name in ALL:
        kind, chosen = CASES[count][name]
        new = [option for option, value in chosen.items() if (option, value) not in options]
        assert kind in models and (not new or (count == 4 and numbers.issuperset(new))), name


@ON_RANKS
def test_trains_like_plain_pytorch(count: int, name: str, ranks: Ranks, plain: Callable[..., Run]) -> None:
    answers, folder = ranks(count, name)
    answer = answers["train"][name]
    how = {"balance": BALANCE} if name.startswith("balanced") else {"told": True} if name.startswith("told") else {}
    expected = plain(CASES[count][name][0], **how)
    assert answer["logprobs"] == pytest.approx(expected.logprobs, abs=2e-5)
    assert answer["entropies"] == pytest.approx(expected.entropies, abs=2e-5)
    assert answer["losses"] == pytest.approx(expected.losses, rel=2e-5)
    assert answer["norms"] == pytest.approx(expected.norms, rel=2e-5)
    trained = load_file(folder / f"{name}.safetensors")
    for tensor, weights in trained.items():
        torch.testing.assert_close(weights, expected.weights[tensor].float(), atol=1e-4, rtol=0, msg=tensor)
    untrained = {name for name in expected.weights if "visual" not in name} - set(trained)
    assert untrained <= {"lm_head.weight"}  # a tied model's head is its embedding


@ON_RANKS
def test_exports_what_it_has_read_bit_for_bit(count: int, name: str, ranks: Ranks) -> None:
    assert ranks(count, name)[0]["train"][name]["changed"] == []


TOLD = [(count, name) for count, name in ALL if name.startswith("told")]


@pytest.mark.parametrize(("count", "name"), TOLD)
def test_the_reference_sends_tokens_where_the_engine_did_too(count: int, name: str, ranks: Ranks) -> None:
    """It has the weights that the policy began with."""
    answer = ranks(count, name)[0]["train"][name]
    assert answer["reference"] == pytest.approx(answer["logprobs"], abs=2e-5)


def test_parameters_are_in_host_memory_between_phases(ranks: Ranks) -> None:
    answers = ranks(1)[0]["train"]
    assert answers["parameters in host memory"]["resident"] == 0
    assert answers["qwen3_moe"]["resident"] > 0


def test_nothing_is_left_of_models_that_are_done_with(ranks: Ranks) -> None:
    assert ranks(2)[0]["left_behind"] == {"parameters": 0, "groups": 0}


@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v3"])
def test_bfloat16_trains_nearly_alike(kind: str, ranks: Ranks, plain: Callable[..., Run]) -> None:
    answers, folder = ranks(1)
    answer, expected = answers["train"][f"bfloat16 {kind}"], plain(kind)
    assert answer["changed"] == []
    assert answer["losses"] == pytest.approx(expected.losses, rel=0.05)
    assert answer["norms"] == pytest.approx(expected.norms, rel=0.05)
    assert answer["reference"] == answer["logprobs"]  # the policy has moved on, the reference has not
    for tensor, weights in load_file(folder / f"bfloat16 {kind}.safetensors").items():
        assert weights.dtype == (torch.float32 if "e_score_correction_bias" in tensor else torch.bfloat16)
        torch.testing.assert_close(weights.float(), expected.weights[tensor].float(), atol=0.02, rtol=0.01, msg=tensor)


def test_fp8_weights_train_as_the_weights_that_they_stand_for(ranks: Ranks) -> None:
    answers, folder = ranks(1)
    quantized, plain = (answers["train"][name] for name in ("fp8", "fp8 dequantized"))
    for part in ("logprobs", "reference", "losses", "norms"):
        assert quantized[part] == plain[part], part
    assert plain["changed"] == []
    found, expected = (load_file(folder / f"{name}.safetensors") for name in ("fp8", "fp8 dequantized"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("kind", [kind for kind in EVERY if kind not in DENSE])
def test_reports_how_the_tokens_spread_over_the_experts(kind: str, ranks: Ranks) -> None:
    memory = ranks(1)[0]["train"][kind]["memory"]
    assert 1.0 < memory["moe/load_max"] <= 8.0
    assert 0.0 <= memory["moe/load_idle"] < 1.0


def test_the_weight_map_is_mbridge_s(ranks: Ranks) -> None:
    for case, told in ranks(1)[0]["against_mbridge"].items():
        assert told["different"] == [], case
        assert told["agreed"] >= 30, case
        assert all(name.startswith("decoder.layers.1.mlp.linear_fc") for name in told["unknown"]), case


def test_the_auxiliary_loss_is_told(ranks: Ranks) -> None:
    alone = ranks(1)[0]["train"]["balanced"]["memory"]["moe/aux_loss"]
    assert 1.0 < alone < 2.0  # 1 where all experts are alike
    assert ranks(2)[0]["train"]["balanced PP2"]["memory"]["moe/aux_loss"] == pytest.approx(alone, rel=1e-4)


def test_a_router_that_is_not_trained_stays(ranks: Ranks, models: dict[str, Path]) -> None:
    trained = load_file(ranks(1)[1] / "router kept.safetensors")
    for name, weights in load_file(models["qwen3_moe"] / "model.safetensors").items():
        assert torch.equal(weights, trained[name]) is name.endswith("mlp.gate.weight"), name


def test_a_balancing_bias_stays_where_no_step_follows(ranks: Ranks) -> None:
    assert ranks(1)[0]["train"]["bias moved"]["changed"] == []


def test_a_balancing_bias_goes_towards_idle_experts(ranks: Ranks, models: dict[str, Path]) -> None:
    trained = load_file(ranks(1)[1] / "bias moved.safetensors")
    moved = []
    for name, weights in load_file(models["moonlight"] / "model.safetensors").items():
        if name.endswith("e_score_correction_bias"):
            moved += ((trained[name] - weights) / 0.01).tolist()  # two updates: by -2, 0 or 2 steps, or not alike
    assert {round(value) for value in moved} <= {-2, -1, 0, 1, 2} and len(moved) == 3 * 8
    assert moved == pytest.approx([round(value) for value in moved], abs=1e-3)
    assert min(moved) < 0 < max(moved)

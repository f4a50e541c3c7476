"""What the backends share of LoRA: the first values of adapters, and that jobs without one do not wait for PEFT."""

import json
import math
import subprocess
import sys

import pytest
import torch

from services.trainer.backends.lora import first_a


@pytest.mark.parametrize(
    ("init", "spread"), [("kaiming", math.sqrt(1 / 3 / 512)), ("gaussian", 1 / 64), ("xavier", math.sqrt(2 / 576))]
)
def test_first_values_of_a_matrix_a_have_the_spread_of_their_formula(init: str, spread: float) -> None:
    drawn = first_a("layers.0.q_proj.lora_A.weight", (64, 512), init, seed=0)
    assert float(drawn.std()) == pytest.approx(spread, rel=0.02) and abs(float(drawn.mean())) < 0.02 * spread
    assert torch.equal(drawn, first_a("layers.0.q_proj.lora_A.weight", (64, 512), init, seed=0))
    assert not torch.equal(drawn, first_a("layers.0.k_proj.lora_A.weight", (64, 512), init, seed=0))


BACKENDS = ("fsdp2.backend", "megatron.build")


@pytest.fixture(scope="module")
def with_peft() -> dict[str, bool]:
    """Backend → whether PEFT is loaded after it, in a process that loads one after the other."""
    code = (
        f"import importlib, json, sys\ntold = {{}}\nfor module in {BACKENDS}:\n"
        "    importlib.import_module(f'services.trainer.backends.{module}')\n"
        "    told[module] = 'peft' in sys.modules\n"
        "print(json.dumps(told))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, bool] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize("module", BACKENDS)
def test_a_backend_is_loaded_without_peft(module: str, with_peft: dict[str, bool]) -> None:
    assert not with_peft[module]

"""What a rank holds by part: measured by its tensors, and as predicted for the same model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from millrace.memory.ledger import KEPT, Ledger, Part, Phase
from millrace.memory.prediction import predict
from millrace.memory.shape import decoder_shape
from services.trainer.backends import build
from services.trainer.memory import meter
from services.trainer.memory.meter import measured, of_tensors
from services.trainer.ranks.commands import ControlThread
from tests.services.trainer.coordinator import ScriptedCoordinator
from tests.services.trainer.groups import job_spec, random_groups
from tests.services.trainer.step.test_step import local_step

CPU = torch.device("cpu")


def test_a_storage_counts_once_and_an_empty_one_not_at_all() -> None:
    base, freed = torch.zeros(100), torch.zeros(50)
    freed.untyped_storage().resize_(0)
    ledger = of_tensors({Part.WEIGHTS: [base[:10], base[50:]], Part.OPTIMIZER: [base, freed, torch.zeros(5)]}, CPU)
    assert ledger.device == {Part.WEIGHTS: 400, Part.OPTIMIZER: 20}


def test_on_a_gpu_what_is_in_host_memory_is_offloaded() -> None:
    ledger = of_tensors({Part.WEIGHTS: [torch.zeros(10)], Part.REFERENCE: []}, torch.device("cuda"))
    assert ledger.total == 0 and ledger.host == {Part.WEIGHTS: 40}


@pytest.mark.parametrize("adapted", [False, True], ids=["all weights", "adapter"])
def test_a_step_measures_what_is_predicted(
    adapted: bool, one_rank: torch.device, control: ControlThread, served: ScriptedCoordinator, untied_model: Path
) -> None:
    """Within 2 %: the prediction leaves out biases and some norms."""
    model = {"lora": {"rank": 4}} if adapted else {}
    spec = job_spec(untied_model, model=model, algorithm={"kl": {"name": "k1"}, "critic": None})
    _, step = local_step(spec, one_rank, control, served)
    step(1, random_groups(4, 4))
    metrics = step(2, random_groups(4, 4, seed=2))
    every = predict(spec, decoder_shape(untied_model), 1)
    predicted = every[Phase.UPDATE].device
    parts = {Part.WEIGHTS, Part.ADAPTER} if adapted else {Part.WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER, Part.REFERENCE}
    for part in parts:
        assert metrics[f"memory/update/{part}"] * (1 << 30) == pytest.approx(predicted[part], rel=0.02), part
        assert metrics[f"memory/update/predicted/{part}"] * (1 << 30) == pytest.approx(predicted[part])
    for phase in (Phase.LOAD, Phase.SCORING, Phase.UPDATE):
        assert metrics[f"memory/{phase}/predicted/peak"] * (1 << 30) == pytest.approx(every[phase].total), phase
        rest = sum(size for part, size in every[phase].device.items() if part not in KEPT)
        assert metrics[f"memory/{phase}/predicted/rest"] * (1 << 30) == pytest.approx(rest), phase
    assert not any(name.startswith("memory/publication/") for name in metrics)  # there was none
    loaded = {name for name in metrics if name.startswith("memory/load/") and "/predicted/" not in name}
    loaded = {name.removeprefix("memory/load/") for name in loaded}
    assert loaded == ({"weights", "adapter"} if adapted else {"weights", "gradients", "optimizer", "reference"})


def test_the_critic_is_a_part_of_its_own(one_rank: torch.device, untied_model: Path) -> None:
    spec = job_spec(untied_model, algorithm={"preset": "ppo", "kl": None})
    backend = build(spec, one_rank)
    held, alone = measured(backend).device, measured(build(job_spec(untied_model), one_rank)).device
    predicted = predict(spec, decoder_shape(untied_model), 1)[Phase.SCORING].device
    assert held[Part.WEIGHTS] == alone[Part.WEIGHTS]
    assert held[Part.CRITIC] == pytest.approx(predicted[Part.CRITIC] / 3, rel=0.02)  # weights without moments


def test_what_a_step_of_ppo_holds_when_the_policy_has_its_gradients_is_what_is_predicted(
    one_rank: torch.device,
    control: ControlThread,
    served: ScriptedCoordinator,
    untied_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within 2 %, as above. The critic's optimizer runs after the policy's backward pass."""
    spec = job_spec(untied_model, algorithm={"preset": "ppo", "kl": None})
    backend, step = local_step(spec, one_rank, control, served)
    held: list[Ledger] = []
    norm = backend.gradient_norm

    def gradient_norm() -> float:
        held.append(measured(backend))
        return float(norm())

    monkeypatch.setattr(backend, "gradient_norm", gradient_norm)
    for number in (1, 2):
        step(number, random_groups(4, 4, seed=number))
    predicted = predict(spec, decoder_shape(untied_model), 1)[Phase.UPDATE].device
    for part in (Part.WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER, Part.CRITIC):
        assert held[1].device[part] == pytest.approx(predicted[part], rel=0.02), part


def test_activations_are_what_the_first_forward_pass_leaves(
    monkeypatch: pytest.MonkeyPatch, untied_model: Path
) -> None:
    """Without what was there before, and without what the backend's parts took meanwhile; the larger of both models."""
    gib, allocated, held = 1 << 30, {"bytes": 0.0}, {"bytes": 0.0}
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated["bytes"])
    for name in ("max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0.0)
    monkeypatch.setattr(meter, "measured", lambda backend: Ledger({Part.WEIGHTS: held["bytes"]}))
    backend: Any = SimpleNamespace(device=torch.device("cuda"))
    subject = meter.MemoryMeter(job_spec(untied_model), backend, rank=0, ranks=1)

    def forward(weights: float, other: float) -> None:
        held["bytes"], allocated["bytes"] = weights * gib, (weights + other) * gib
        assert subject.watched(lambda number, *, sign: sign * number)(3, sign=-1) == -3

    for part, activations in (("update_critic", 2.0), ("update_actor", 5.0), ("update_actor", 4.0)):
        held["bytes"], allocated["bytes"] = 10 * gib, 11 * gib
        with subject.during(part):
            forward(weights=16, other=1 + activations)  # weights came back from host memory
            forward(weights=20, other=30)  # of a second micro-batch
    forward(weights=20, other=90)
    assert subject.metrics()["memory/update/activations"] == 5.0

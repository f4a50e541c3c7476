"""Every switch that saves memory, alone and with the others, computes what the plain run computes, on one rank.

Several micro-batches add up to one update. Losses, gradients and updated weights are the plain run's to the last bit:
the switches move values, and compute the same in the same order. `test_divisions` has the same over ranks.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.trainer.backends import build
from services.trainer.backends.fsdp2 import activation_offload as activations
from services.trainer.backends.fsdp2 import host_adamw
from services.trainer.checkpoints import checkpoint
from services.trainer.protocol.backend import TokenScores
from services.trainer.protocol.microbatch import MicroBatch
from tests.services.trainer.backends.fsdp2.test_backend import samples
from tests.services.trainer.checkpoints.saved import save
from tests.services.trainer.groups import job_spec

LORA: dict[str, Any] = {"lora": {"rank": 4, "init": "gaussian"}}
SWITCHES = ("offload_parameters", "offload_optimizer", "offload_activations", "activation_recompute")
Division = Sequence[Sequence[tuple[int, int]]]
"""For each micro-batch the prompt and response lengths of its sequences."""
THREE: Division = [[(3, 9), (12, 4)], [(7, 20)], [(5, 5), (2, 8), (4, 1)]]


@pytest.fixture(autouse=True)
def in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 256)
    monkeypatch.setattr(host_adamw, "PART_BYTES", 20_000)


def built(
    model: Path, device: torch.device, switches: Mapping[str, bool], lora: bool, critic: bool = False, **division: int
) -> Any:
    """A backend. `division`: the options that divide ranks into groups."""
    options = {name: on for name, on in switches.items() if name != "activation_recompute"} | division
    trainer = {"activation_recompute": switches.get("activation_recompute", False), "backend_options": options}
    algorithm = {"advantage": "gae", "critic": {}} if critic else {}
    return build(job_spec(model, trainer=trainer, algorithm=algorithm, model=LORA if lora else {}), device)


def micro_batches(division: Division) -> list[MicroBatch]:
    drawn = samples([lengths for batch in division for lengths in batch])
    rows = iter(range(len(drawn)))
    return [MicroBatch.pack(drawn, [next(rows) for _ in lengths]) for lengths in division]


def updated(backend: Any, batches: Sequence[MicroBatch], updates: int) -> dict[str, Tensor]:
    """Losses, gradients and weights of the updates, each of all micro-batches."""
    found: dict[str, Tensor] = {}

    def loss(batch: MicroBatch, scores: TokenScores) -> tuple[Tensor, Tensor]:
        assert scores.entropy_r is not None
        value = -scores.logprobs_r.sum() / 50 - 0.01 * scores.entropy_r.sum()
        return value, value.detach()

    for number in range(updates):
        losses = backend.forward_backward(batches, loss, temperature=0.8)
        found[f"{number}.losses"] = torch.stack(losses)
        for name, parameter in backend._trained.items():
            found[f"{number}.gradient.{name}"] = parameter.grad.full_tensor().clone()
        backend.optimizer_step(lr=1e-2, gradient_scale=0.5)
        for name, parameter in backend._trained.items():
            found[f"{number}.weight.{name}"] = parameter.detach().full_tensor().clone()
    return found


def check(model: Path, device: torch.device, switches: Mapping[str, bool], lora: bool, division: Division) -> None:
    batches = micro_batches(division)
    expected = updated(built(model, device, {}, lora), batches, 2)
    found = updated(built(model, device, switches, lora), batches, 2)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


@pytest.mark.parametrize(
    ("switches", "lora"),
    [
        (("offload_optimizer",), False),
        (("offload_parameters",), False),
        (("activation_recompute",), False),
        (("offload_parameters", "activation_recompute"), True),
        (SWITCHES, False),
    ],
    ids=["moments alone", "parameters alone", "recomputed alone", "LoRA", "all"],
)
def test_recommended_combinations(
    one_rank: torch.device, untied_model: Path, switches: tuple[str, ...], lora: bool
) -> None:
    check(untied_model, one_rank, dict.fromkeys(switches, True), lora, THREE)


lengths = st.tuples(st.integers(1, 12), st.integers(1, 20))
drawn_cases = given(
    on=st.sets(st.sampled_from(SWITCHES)),
    lora=st.booleans(),
    division=st.lists(st.lists(lengths, min_size=1, max_size=3), min_size=1, max_size=4),
)
IGNORED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=2, suppress_health_check=IGNORED, derandomize=True)
@drawn_cases
def test_a_few_drawn(one_rank: torch.device, tied_model: Path, on: set[str], lora: bool, division: Division) -> None:
    check(tied_model, one_rank, dict.fromkeys(on, True), lora, division)


@pytest.mark.matrix  # test_a_few_drawn
@settings(max_examples=60, suppress_health_check=IGNORED)
@drawn_cases
def test_many_drawn(one_rank: torch.device, tied_model: Path, on: set[str], lora: bool, division: Division) -> None:
    check(tied_model, one_rank, dict.fromkeys(on, True), lora, division)


def test_a_checkpoint_has_the_moments_wherever_they_are(
    one_rank: torch.device, tied_model: Path, tmp_path: Path
) -> None:
    """Written with moments on the device and read with moments in host memory, and the other way round."""
    whole = built(tied_model, one_rank, {}, False, critic=True)
    updated(whole, micro_batches(THREE), 2)
    save(tmp_path / "device", whole, 2)
    resumed = built(tied_model, one_rank, {"offload_optimizer": True}, False, critic=True)
    assert checkpoint.load(str(tmp_path / "device"), resumed).version == 2
    save(tmp_path / "host", resumed, 2)
    again = built(tied_model, one_rank, {}, False, critic=True)
    checkpoint.load(str(tmp_path / "host"), again)
    expected = updated(whole, micro_batches(THREE), 1)
    for backend in (resumed, again):
        for name, values in updated(backend, micro_batches(THREE), 1).items():
            assert torch.equal(values, expected[name]), name

"""Offloaded activations: every gradient stays the same to the last bit, and the device holds two layers of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from services.trainer.backends import build
from services.trainer.backends.fsdp2 import activation_offload as activations
from services.trainer.backends.fsdp2.activation_offload import ActivationOffload
from services.trainer.protocol.microbatch import MicroBatch
from tests.services.trainer.backends.fsdp2.test_backend import samples
from tests.services.trainer.backends.fsdp2.test_lora import loss
from tests.services.trainer.groups import job_spec

DRAWN = samples([(3, 9), (12, 4), (7, 20), (5, 5)])
BATCHES = [MicroBatch.pack(DRAWN, [0, 1]), MicroBatch.pack(DRAWN, [2]), MicroBatch.pack(DRAWN, [3])]


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 256)


@pytest.fixture
def storages(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sizes of the storages that were copied to host memory."""
    sizes: list[int] = []
    original = activations._SavedStorage.__init__

    def counted(self: Any, storage: torch.UntypedStorage, copies: Any) -> None:
        sizes.append(storage.nbytes())
        original(self, storage, copies)

    monkeypatch.setattr(activations._SavedStorage, "__init__", counted)
    yield sizes


def gradients(folder: Path, device: torch.device, trainer: dict[str, Any], **parts: Any) -> dict[str, Tensor]:
    """The policy's gradients after three micro-batches, and the critic's where there is one."""
    backend: Any = build(job_spec(folder, trainer=trainer, **parts), device)
    backend.forward_backward(BATCHES, loss, temperature=1.0)
    found = {name: parameter.grad.full_tensor() for name, parameter in backend._trained.items()}
    if backend.critic is not None:
        backend.critic.forward_backward(BATCHES, lambda _, values_r: (values_r.square().sum() + values_r.sum(), None))
        found |= {f"critic.{name}": each.grad.full_tensor() for name, each in backend.critic._trained.items()}
    return found


CRITIC = {"advantage": "gae", "critic": {}}


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_gradients_are_the_same_bits(
    one_rank: torch.device, tied_model: Path, storages: list[int], recompute: bool
) -> None:
    """Of policy and critic, with layers kept and recomputed; then only the inputs of layers are copied."""
    trainer: dict[str, Any] = {"activation_recompute": recompute}
    expected = gradients(tied_model, one_rank, trainer, algorithm=CRITIC)
    assert not storages
    found = gradients(
        tied_model, one_rank, {**trainer, "backend_options": {"offload_activations": True}}, algorithm=CRITIC
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    passes, layers = 2 * len(BATCHES), 2
    assert len(storages) > passes * layers * (1 if recompute else 5)
    assert not recompute or len(storages) < passes * (layers + 5)


def test_adapters_and_weights_in_host_memory(one_rank: torch.device, tied_model: Path, storages: list[int]) -> None:
    lora = {"lora": {"rank": 4, "init": "gaussian"}}
    plain = gradients(tied_model, one_rank, {}, model=lora)
    options = {"offload_activations": True, "offload_parameters": True}
    found = gradients(tied_model, one_rank, {"backend_options": options}, model=lora)
    assert storages and all(torch.equal(found[name], gradient) for name, gradient in plain.items())


class Stack(nn.Module):
    """Layers that save their input and the output of their product."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(layers))

    def forward(self, hidden_th: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_th = layer(hidden_th)
        return hidden_th


def on_device(forward: activations._ForwardPass) -> list[int]:
    """For each layer the number of saved storages that are on the device."""
    return [sum(saved._device_b is not None for saved in layer) for layer in forward.layers]


def test_two_layers_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the forward pass the current layer and the one before it; in the backward pass the current layer, and the one
    that comes next."""
    torch.manual_seed(0)
    stack, most = Stack(6), 0
    offload = ActivationOffload(torch.device("cpu"))
    offload.install(stack, stack.layers)
    output_th = stack(torch.randn(32, 64, requires_grad=True))
    forward = offload._forward
    assert [count > 0 for count in on_device(forward)] == [False] * 5 + [True] * 2
    unpack = activations._SavedStorage.use

    def watched(self: Any) -> torch.UntypedStorage:
        nonlocal most
        most = max(most, sum(count > 0 for count in on_device(forward)))
        return unpack(self)

    monkeypatch.setattr(activations._SavedStorage, "use", watched)
    output_th.sum().backward()
    assert most == 2
    assert not any(on_device(forward))


def test_parameters_and_small_tensors_stay(monkeypatch: pytest.MonkeyPatch, storages: list[int]) -> None:
    stack = Stack(2)
    ActivationOffload(torch.device("cpu")).install(stack, stack.layers)
    stack(torch.randn(3, 64, requires_grad=True)).sum().backward()
    assert set(storages) == {3 * 64 * 4}
    storages.clear()
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 1000)
    stack(torch.randn(3, 64, requires_grad=True)).sum().backward()
    assert not storages


def test_views_share_one_copy(storages: list[int]) -> None:
    """A tensor that several products save in different shapes is copied once."""

    class Twice(nn.Module):
        def forward(self, value_tk: Tensor) -> Tensor:
            doubled_tk = value_tk * 2
            return (doubled_tk @ doubled_tk.t()).sum() + (doubled_tk[:, :8].t() @ doubled_tk).sum()

    module, value_tk = Twice(), torch.randn(16, 16, requires_grad=True)
    module(value_tk).backward()
    expected, value_tk.grad = value_tk.grad, None
    ActivationOffload(torch.device("cpu")).install(module, [])
    module(value_tk).backward()
    assert value_tk.grad is not None and expected is not None and torch.equal(value_tk.grad, expected)
    assert storages == [16 * 16 * 4]

"""A rank that has no memory left in an optimizer: a step is repeated only where no weight can have changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from millrace.errors import InvalidState, OutOfMemory, PartialOutOfMemory
from services.trainer.backends.fsdp2 import host_adamw
from services.trainer.backends.fsdp2.host_adamw import HostAdamW
from tests.services.trainer.memory.rank import BUDGET, Rank

PPO = {"preset": "ppo", "kl": None}
ON_HOST = {"backend_options": {"offload_optimizer": True}}


def failing_at(call: int, own: Callable[..., Any], counts: Callable[..., bool] = lambda *_, **__: True) -> Any:
    """`own`, but for which there is no memory at one call of those that count."""
    calls = 0

    def function(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += counts(*arguments, **named)
        if calls == call and counts(*arguments, **named):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return own(*arguments, **named)

    return function


# the actor's alone: test_so_does_one_in_host_memory_of_which_some_parts_are_done
@pytest.mark.parametrize("learner", [pytest.param("actor", marks=pytest.mark.matrix), "critic"])
def test_an_optimizer_that_may_have_written_weights_costs_them(
    learner: str,
    new_rank: Callable[..., Rank],
    untied_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The critic's is the first of the step, the policy's comes after it."""
    rank = new_rank(untied_model, algorithm=PPO)
    backend: Any = rank.worker._loaded().backend
    model = backend if learner == "actor" else backend.critic
    monkeypatch.setattr(model._optimizer, "step", failing_at(1, model._optimizer.step))
    with pytest.raises(PartialOutOfMemory, match=f"the {'policy' if learner == 'actor' else learner}'s update, step 1"):
        rank.step(1)
    with pytest.raises(InvalidState, match="no job is loaded"):
        rank.step(1)


def test_so_does_one_in_host_memory_of_which_some_parts_are_done(
    new_rank: Callable[..., Rank],
    tied_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_adamw, "PART_BYTES", 1)
    rank = new_rank(tied_model, trainer=ON_HOST)
    monkeypatch.setattr(HostAdamW, "_update", failing_at(3, HostAdamW._update))
    before = rank.weights()
    backend: Any = rank.worker._loaded().backend
    with pytest.raises(PartialOutOfMemory):
        rank.step(1)
    after = {info.name: tensor for info, tensor in backend.export("float32")}
    assert 0 < sum(not torch.equal(after[name], tensor) for name, tensor in before.items()) < len(before)
    with pytest.raises(InvalidState, match="no job is loaded"):
        rank.step(1)


MOMENTS: dict[str, tuple[str, Callable[..., bool], dict[str, Any]]] = {
    "device": ("zeros_like", lambda tensor, **_: isinstance(tensor, DTensor), {}),
    "host": ("zeros", lambda *_, **named: "pin_memory" in named, ON_HOST),
}
"""How an optimizer allocates its moments: the function of torch, which calls of it, and the job's options."""


# `make test` has each place and each algorithm once
@pytest.mark.parametrize(
    ("algorithm", "place"),
    [
        pytest.param({}, "device", id="policy-device"),
        pytest.param({}, "host", id="policy-host", marks=pytest.mark.matrix),
        pytest.param(PPO, "device", id="policy after critic-device", marks=pytest.mark.matrix),
        pytest.param(PPO, "host", id="policy after critic-host"),
    ],
)
def test_without_memory_for_the_first_moments_the_step_is_repeated_as_if_nothing_had_been(
    algorithm: dict[str, Any],
    place: str,
    new_rank: Callable[..., Rank],
    untied_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit. Memory runs out between the two moments of a weight, with a critic after all of its moments."""
    function, counts, trainer = MOMENTS[place]
    plain = new_rank(untied_model, algorithm=algorithm, trainer=trainer)
    metrics = [plain.step(number, BUDGET // 2) for number in (1, 2)]
    expected = plain.weights()
    rank = new_rank(untied_model, algorithm=algorithm, trainer=trainer)
    backend: Any = rank.worker._loaded().backend
    moments = 2 * len(backend.critic._trained) if algorithm else 0
    with monkeypatch.context() as patched:
        patched.setattr(torch, function, failing_at(moments + 6, getattr(torch, function), counts))
        with pytest.raises(OutOfMemory, match="ran out of memory in the policy's update, step 1") as raised:
            rank.step(1)
    assert type(raised.value) is OutOfMemory
    assert not [name for name in backend.state() if name.startswith("exp_avg")]
    again = [rank.step(number, BUDGET // 2) for number in (1, 2)]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in rank.weights().items())
    for before, after in zip(metrics, again, strict=True):
        assert before["actor/grad_norm"] == after["actor/grad_norm"]

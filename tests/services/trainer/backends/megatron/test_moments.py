"""The moments of Megatron's optimizers, before and after the first update.

Each check runs in a process of its own, which alone imports Megatron: on the host it changes torch for all.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn import Parameter

from tests.forked import CONTEXT


def optimizer() -> tuple[list[Parameter], torch.optim.AdamW]:
    parameters = [Parameter(torch.full((4,), float(value))) for value in range(3)]
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    return parameters, torch.optim.AdamW(parameters, lr=0.1)


def made_before_the_first_update_they_change_nothing_of_it() -> None:
    from services.trainer.backends.megatron import master_weights
    from services.trainer.backends.megatron.master_weights import OwnedRange

    (plain, by_itself), (parameters, prepared) = optimizer(), optimizer()
    part: Any = SimpleNamespace(optimizer=prepared)
    master_weights.make_moments(part)
    owned = [OwnedRange(each, each.detach(), 0, prepared, each) for each in parameters]
    assert all(each.moment("exp_avg") is None for each in owned)  # a checkpoint has none before the first update
    for _ in range(2):
        by_itself.step()
        master_weights.make_moments(part)
        prepared.step()
    for mine, other, each in zip(parameters, plain, owned, strict=True):
        moment = each.moment("exp_avg_sq")
        assert moment is not None and torch.equal(moment, by_itself.state[other]["exp_avg_sq"])
        assert torch.equal(mine, other)


def without_memory_for_all_there_are_none() -> None:
    from services.trainer.backends.megatron import master_weights

    parameters, prepared = optimizer()
    part: Any = SimpleNamespace(optimizer=prepared)
    own, calls = torch.zeros_like, list[torch.Tensor]()

    def zeros_like(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return own(tensor)

    with patch.object(torch, "zeros_like", zeros_like):
        with pytest.raises(torch.OutOfMemoryError):
            master_weights.make_moments(part)
        assert not prepared.state
        master_weights.make_moments(part)
    assert len(prepared.state) == len(parameters)


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", [made_before_the_first_update_they_change_nothing_of_it, without_memory_for_all_there_are_none]
)
def test_moments(check: Callable[[], None]) -> None:
    process = CONTEXT.Process(target=check)
    process.start()
    process.join(300)
    assert process.exitcode == 0

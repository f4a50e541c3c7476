"""Ranks that run out of memory."""

import functools
from collections.abc import Callable

import pytest
import torch

from services.trainer.ranks.commands import ControlThread
from tests.services.trainer.coordinator import ScriptedCoordinator
from tests.services.trainer.memory.rank import Rank


@pytest.fixture
def new_rank(one_rank: torch.device, control: ControlThread, served: ScriptedCoordinator) -> Callable[..., Rank]:
    """Makes the only rank of a trainer, with a job for a model folder: see `Rank`."""
    return functools.partial(Rank, control, served)

"""Model folders, a coordinator, and a world of one rank in this process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from services.trainer.ranks.commands import ControlThread
from tests.models import save_tiny_model
from tests.services.trainer.coordinator import ScriptedCoordinator, coordinator


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tied") / "model", tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("untied") / "model", tied=False)


@pytest.fixture
def served() -> Iterator[ScriptedCoordinator]:
    with coordinator() as running:
        yield running


@pytest.fixture
def one_rank() -> Iterator[torch.device]:
    """A process group of this process alone; the device of its rank."""
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield torch.device("cpu")
    dist.destroy_process_group()


@pytest.fixture
def control() -> Iterator[ControlThread]:
    thread = ControlThread()
    yield thread
    thread.stop()

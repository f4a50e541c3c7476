import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import fork_vllm
from tests.models import save_tiny_model

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models on a busy host: threads that wait for each other cost more than they bring."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def forked() -> None:
    fork_vllm()


@pytest.fixture(scope="session")
def run() -> Iterator[Run]:
    """Runs coroutines on one event loop, so that an engine can be shared between tests."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("untied"), tied=False)

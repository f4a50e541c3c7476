"""Devices of the tests on GPUs. The mark `gpu(2)` skips a test on a host with fewer than two of them."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = max((mark.args[0] for mark in item.iter_markers("gpu") if mark.args), default=1)
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs CUDA devices: {needed}")


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The first GPU, in a process group of this process alone; all of its memory may be used again at the end."""
    chosen = torch.device("cuda", 0)
    torch.cuda.set_device(chosen)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield chosen
    torch.cuda.set_per_process_memory_fraction(1.0)
    dist.destroy_process_group()

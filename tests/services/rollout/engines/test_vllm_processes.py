"""Processes of vLLM that no launcher has forked: they are spawned, and say why they refuse."""

import os
from multiprocessing import context

import pytest

from services.rollout.engines.vllm.processes import SpawnedProcess, refusals, take_over_spawn


def _refuses() -> None:
    raise ValueError(f"no room in {os.environ['ROOM']}")


@pytest.mark.slow
def test_without_a_launcher_it_is_spawned_and_says_why_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context.SpawnContext, "Process", context.SpawnContext.Process)
    monkeypatch.setenv("ROOM", "the cellar")
    take_over_spawn()
    assert context.SpawnContext.Process is SpawnedProcess
    process = context.SpawnContext().Process(target=_refuses)
    process.start()
    process.join(120)
    assert process.exitcode == 1
    assert refusals() == ["no room in the cellar"] and refusals() == []

"""Sharded publications from real backends on two ranks: bit for bit what gathering gives, for every way of sharding."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.services.trainer.backends.megatron import tiny
from tests.services.trainer.backends.megatron.launch import launch

pytestmark = pytest.mark.slow

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "FSDP2 tied": ("fsdp2", "qwen2", {}),
    "FSDP2 MoE": ("fsdp2", "qwen3_moe", {}),
    "TP2 tied, padded vocabulary": ("megatron", "qwen2", {"tensor_parallel": 2}),
    "TP2": ("megatron", "qwen3", {"tensor_parallel": 2}),
    "PP2 tied": ("megatron", "qwen2", {"pipeline_parallel": 2}),
    "EP2": ("megatron", "qwen3_moe", {"expert_parallel": 2}),
    "DP2": ("megatron", "qwen3", {}),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    root = tmp_path_factory.mktemp("shards")
    for kind in {kind for _, kind, _ in CASES.values()}:
        tiny.save(kind, root / kind)
    cases = {
        name: {"backend": backend, "model": str(root / kind), "options": options, "dtype": "float32"}
        for name, (backend, kind, options) in CASES.items()
    }
    yield launch(
        2, root / "ranks", module="tests.services.trainer.publication.shard_ranks", arguments=json.dumps(cases)
    )


@pytest.mark.parametrize("name", CASES)
def test_receivers_hold_what_gathering_gives(name: str, answers: dict[str, Any]) -> None:
    assert answers[name]["tensors"] > 20 and answers[name]["wrong"] == []


@pytest.mark.parametrize("name", CASES)
def test_a_receiver_that_does_not_come_fails_all_ranks_by_the_deadline(name: str, answers: dict[str, Any]) -> None:
    assert answers[name]["failure"] != "nothing" and answers[name]["late"] < 5.0

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
    "FSDP2 merged": ("fsdp2", "qwen3", {}),
    "TP2 merged": ("megatron", "qwen3", {"tensor_parallel": 2}),
    "EP2 merged": ("megatron", "qwen3_moe", {"expert_parallel": 2}),
    "FSDP2 tied, deltas": ("fsdp2", "qwen2", {}),
    "TP2, deltas": ("megatron", "qwen3", {"tensor_parallel": 2}),
}
MERGED: dict[str, dict[str, Any]] = {
    "FSDP2 merged": {"rank": 3, "dora": True},
    "TP2 merged": {"rank": 3, "exclude_modules": ["k_proj"]},
    "EP2 merged": {"rank": 2, "target_modules": ["v_proj", "experts"]},
}
"""The adapters that are merged with the weights of some cases."""
DELTAS = [name for name in CASES if name.endswith("deltas")]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    root = tmp_path_factory.mktemp("shards")
    for kind in {kind for _, kind, _ in CASES.values()}:
        tiny.save(kind, root / kind)
    cases = {
        name: {
            "backend": backend,
            "model": str(root / kind),
            "options": options,
            "dtype": "float32",
            "delta": name in DELTAS,
        }
        for name, (backend, kind, options) in CASES.items()
    }
    for name, lora in MERGED.items():
        cases[name] |= {"lora": {"merge": True, **lora}}
    yield launch(
        2, root / "ranks", module="tests.services.trainer.publication.shard_ranks", arguments=json.dumps(cases)
    )


@pytest.mark.parametrize("name", CASES)
def test_receivers_hold_what_gathering_gives(name: str, answers: dict[str, Any]) -> None:
    assert answers[name]["tensors"] > 20 and answers[name]["wrong"] == []
    assert bool(answers[name]["computed"]) == (name in MERGED)


@pytest.mark.parametrize("name", CASES)
def test_a_receiver_that_does_not_come_fails_all_ranks_by_the_deadline(name: str, answers: dict[str, Any]) -> None:
    assert answers[name]["failure"] != "nothing" and answers[name]["late"] < 5.0


@pytest.mark.parametrize("name", CASES)
def test_only_what_changed_is_sent_where_that_is_asked_for(name: str, answers: dict[str, Any]) -> None:
    first, second, third = answers[name]["shares"]
    delta = name in DELTAS
    assert first == pytest.approx(1.0, abs=0.2) and (0.3 if delta else 0.99) * first < third < 1.01 * first
    assert (second < 0.2 * first) == delta


@pytest.mark.parametrize("name", DELTAS)
def test_after_a_failed_publication_no_base_is_offered(name: str, answers: dict[str, Any]) -> None:
    assert answers[name]["bases"] == [True, False]

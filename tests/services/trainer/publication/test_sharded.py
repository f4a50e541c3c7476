"""Sharded publications from real backends on two ranks: bit for bit what gathering gives, for every way of sharding."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.services.trainer.backends.megatron import tiny
from tests.services.trainer.backends.megatron.launch import launch, once

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
MATRIX = ("FSDP2 tied", "TP2", "DP2", "FSDP2 merged", "EP2 merged", "TP2, deltas")
"""For `make test-all`, launched by themselves: the others have their ways of sharding, of merging and of sending."""
Answer = Callable[[str], dict[str, Any]]
DELTAS = [name for name in CASES if name.endswith("deltas")]


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """Case → what the ranks tell of it."""
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

    @once
    def answers(matrix: bool) -> dict[str, Any]:
        asked = json.dumps({name: case for name, case in cases.items() if (name in MATRIX) == matrix})
        module = "tests.services.trainer.publication.shard_ranks"
        return launch(2, root / f"matrix-{matrix}", module=module, arguments=asked)

    return lambda name: answers(name in MATRIX)[name]


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.matrix] * (n in MATRIX)) for n in names])


@each(CASES)
def test_receivers_hold_what_gathering_gives(name: str, answer: Answer) -> None:
    assert answer(name)["tensors"] > 20 and answer(name)["wrong"] == []
    assert bool(answer(name)["computed"]) == (name in MERGED)


@each(CASES)
def test_a_receiver_that_does_not_come_fails_all_ranks_by_the_deadline(name: str, answer: Answer) -> None:
    assert answer(name)["failure"] != "nothing" and answer(name)["late"] < 5.0


@each(CASES)
def test_only_what_changed_is_sent_where_that_is_asked_for(name: str, answer: Answer) -> None:
    first, second, third = answer(name)["shares"]
    delta = name in DELTAS
    assert first == pytest.approx(1.0, abs=0.2) and (0.3 if delta else 0.99) * first < third < 1.01 * first
    assert (second < 0.2 * first) == delta


@each(DELTAS)
def test_after_a_failed_publication_no_base_is_offered(name: str, answer: Answer) -> None:
    assert answer(name)["bases"] == [True, False]

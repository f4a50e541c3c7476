"""The tables of architectures are what the gate says of each, and accepted ones equal the transformers engine."""

from collections.abc import Iterator
from typing import Any

import pytest

from millrace.fsdp2.architectures import ATTENTIONS, REFUSED, RIGHT, RIGHT_WITH, UNTRIED
from services.trainer.backends.fsdp2.computable import named
from services.trainer.backends.fsdp2.proof.packed import TOLERANCE
from tests.services.trainer.backends.fsdp2 import sweep

COVERING = ("deepseek_v3", "gemma2", "gpt_oss", "glm_moe_dsa", "qwen3", "stablelm")
"""One of each kind: right with every attention, with some, and refused for a keyword, a layer or lost borders."""

EVERY = sorted(name for table in (RIGHT, RIGHT_WITH.keys(), REFUSED.keys(), UNTRIED) for name in table)


def expected(model_type: str) -> tuple[str, ...]:
    return () if model_type in REFUSED else RIGHT_WITH.get(model_type, ATTENTIONS)


def rows(model_type: str) -> Iterator[sweep.Row]:
    """What is measured of each config class of that type."""
    classes: Iterator[Any] = sweep.registry()
    return (sweep.look(made) for made in classes if made.model_type == model_type)


def check(row: sweep.Row) -> None:
    found = tuple(name for name in sweep.IMPLEMENTATIONS if name not in row.refused)
    if found and row.model_type in REFUSED:  # the trainer computes it right, and the engine as another model
        assert row.engine_nats is not None and row.engine_nats > TOLERANCE
        return
    assert tuple(map(named, found)) == expected(row.model_type), row.refused
    if found:
        assert row.engine_nats is not None and row.engine_nats < TOLERANCE


def test_every_architecture_of_transformers_is_in_one_table() -> None:
    assert sorted({made.model_type for made in sweep.registry()}) == EVERY  # type: ignore[attr-defined]


@pytest.mark.parametrize("model_type", COVERING)
def test_the_table_is_what_is_measured(model_type: str) -> None:
    for row in rows(model_type):
        check(row)


@pytest.mark.matrix  # test_the_table_is_what_is_measured covers one of each kind
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model_type", EVERY)
def test_so_is_all_of_it(model_type: str) -> None:
    for row in rows(model_type):
        if model_type in UNTRIED:
            assert all("cannot be" in reason for reason in row.refused.values())
        elif model_type not in COVERING:
            check(row)

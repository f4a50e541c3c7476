"""The tables of architectures are what the gate says of each, and accepted ones equal the transformers engine."""

import pytest

from millrace.fsdp2.architectures import ATTENTIONS, REFUSED, RIGHT, RIGHT_WITH, UNTRIED
from services.trainer.backends.fsdp2.computable import named
from services.trainer.backends.fsdp2.proof.packed import TOLERANCE
from tests.services.trainer.backends.fsdp2 import sweep

COVERING = ("deepseek_v3", "gemma2", "gpt_oss", "glm_moe_dsa", "qwen3", "stablelm")
"""One of each kind: right with every attention, with some, and refused for a keyword, a layer or lost borders."""


def expected(model_type: str) -> tuple[str, ...]:
    return () if model_type in REFUSED else RIGHT_WITH.get(model_type, ATTENTIONS)


def check(made: type) -> None:
    row = sweep.look(made)
    found = tuple(name for name in sweep.IMPLEMENTATIONS if name not in row.refused)
    if found and row.model_type in REFUSED:  # the trainer computes it right, and the engine as another model
        assert row.engine_nats is not None and row.engine_nats > TOLERANCE
        return
    assert tuple(map(named, found)) == expected(row.model_type), row.refused
    if found:
        assert row.engine_nats is not None and row.engine_nats < TOLERANCE


def test_every_architecture_of_transformers_is_in_one_table() -> None:
    tables = (RIGHT, RIGHT_WITH.keys(), REFUSED.keys(), UNTRIED)
    found = sorted(name for table in tables for name in table)
    assert found == sorted({made.model_type for made in sweep.registry()})  # type: ignore[attr-defined]


@pytest.mark.parametrize("model_type", COVERING)
def test_the_table_is_what_is_measured(model_type: str) -> None:
    check(next(made for made in sweep.registry() if made.model_type == model_type))  # type: ignore[attr-defined]


@pytest.mark.matrix  # test_the_table_is_what_is_measured covers one of each kind
@pytest.mark.timeout(600)
@pytest.mark.parametrize("made", sorted(sweep.registry(), key=lambda made: made.model_type), ids=lambda m: m.model_type)
def test_so_is_all_of_it(made: type) -> None:
    if made.model_type in UNTRIED:  # type: ignore[attr-defined]
        assert all("cannot be" in reason for reason in sweep.look(made).refused.values())
    elif made.model_type not in COVERING:  # type: ignore[attr-defined]
        check(made)

"""docs/planner.md: its table is what the planner predicts, and the predictions are as near as was asked for."""

import pytest

from benchmarks import planner


@pytest.fixture(scope="module")
def rows() -> list[planner.Row]:
    return list(planner.rows())


def test_the_table_is_made_by_the_planner(rows: list[planner.Row]) -> None:
    page = planner.PAGE.read_text(encoding="utf-8")
    written = page.split(planner.BEGIN)[1].split(planner.END)[0]
    assert written == planner.table(rows), "python -m benchmarks.planner --write"


def test_every_prediction_is_near_enough_or_says_why_not(rows: list[planner.Row]) -> None:
    outside = [row for row in rows if abs(row.off) > row.within]
    assert [f"{row.case}: {row.text}" for row in outside if not row.why] == []
    assert [f"{row.case}: {row.text}" for row in rows if row.why and row not in outside] == []
    assert len(outside) <= len(rows) / 20


def test_every_constant_of_the_page_is_that_of_the_code() -> None:
    from millrace.planner import constants
    from millrace.planner.trainer import layout

    text = planner.PAGE.read_text(encoding="utf-8")
    told = {
        "`MEMORY_SHARE` 0.8": constants.MEMORY_SHARE,
        "`LINK_SHARE` 0.68": constants.LINK_SHARE,
        "`NETWORK_SHARE` 0.8": constants.NETWORK_SHARE,
        "`HOST_LINK_SHARE` 0.7": constants.HOST_LINK_SHARE,
        "at most 0.4 of": constants.HOST_MEMORY_SHARE,
        "a = 0.64": constants.ATTENTION_SHARE["megatron"],
        "Megatron, 0.47": constants.ATTENTION_SHARE["fsdp2"],
        "50 µs": constants.EXPERT_PRODUCT_S["megatron"] * 1e6,
        "24 µs": constants.EXPERT_PRODUCT_S["fsdp2"] * 1e6,
        "38 bytes": constants.OPTIMIZER_BYTES,
        "28.5 µs": constants.REQUEST_S * 1e6,
        "32 µs": constants.EAGER_OPERATION_S * 1e6,
        "1 + 0.8": layout.EXPERT_SPREAD,
        "and in shadow mode 5.6": constants.COMMIT_PASSES,
    }
    for words, value in told.items():
        assert words in text and f"{value:g}" in words, words

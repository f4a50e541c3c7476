"""reasoning-gym as a source of prompts."""

import json

import pytest

from millrace.data import open_source
from millrace.errors import InvalidJob


def test_the_same_rows_for_the_same_seed_and_options() -> None:
    def rows(seed: int) -> list:
        options = {"seed": seed, "size": 5, "min_word_len": 4}
        return list(open_source(procedural="reasoning_gym:spell_backward", procedural_options=options))

    assert rows(3) == rows(3) != rows(4)
    row = rows(3)[2]
    assert (row.index, row.data_source, row.reward_style) == (2, "reasoning_gym:spell_backward", "rule")
    assert [m["role"] for m in row.prompt] == ["system", "user"]
    assert "<answer>" in row.prompt[0]["content"]
    assert json.loads(json.dumps(row.extra_info)) == row.extra_info


def test_a_row_does_not_depend_on_which_were_read_before() -> None:
    options = {"seed": 1, "size": 20}
    first = open_source(procedural="reasoning_gym:countdown", procedural_options=options)
    second = open_source(procedural="reasoning_gym:countdown", procedural_options=options)
    assert [first[n] for n in (7, 3)] == [second[n] for n in (3, 7)][::-1]
    with pytest.raises(IndexError):
        first[20]


def test_the_system_prompt_can_be_left_out() -> None:
    options = {"size": 1, "system_prompt": None}
    row = open_source(procedural="reasoning_gym:spell_backward", procedural_options=options)[0]
    assert [m["role"] for m in row.prompt] == ["user"]


def test_tasks_can_be_mixed() -> None:
    parts = [
        {"name": "spell_backward", "weight": 1.0},
        {"name": "chain_sum", "weight": 3.0, "config": {"min_terms": 2}},
    ]
    source = open_source(procedural="reasoning_gym:composite", procedural_options={"size": 40, "datasets": parts})
    names = [row.extra_info["reasoning_gym"]["entry"]["metadata"]["source_dataset"] for row in source]
    assert names.count("chain_sum") > names.count("spell_backward") > 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("reasoning_gym:spell_backwards", {}, "did you mean `reasoning_gym:spell_backward`"),
        ("reasoning_gym:", {}, "no such task"),
        ("gsm8k", {}, "no such kind of source"),
        (
            "reasoning_gym:spell_backward",
            {"min_word_length": 3},
            "min_word_length: 3: the task .* has no such.*did you mean `min_word_len`",
        ),
        ("reasoning_gym:spell_backward", {"min_word_len": 0}, "procedural_options: {.*min_word_len"),
        ("reasoning_gym:spell_backward", {"size": 0}, "procedural_options.size: 0: "),
        ("reasoning_gym:spell_backward", {"seed": "x"}, "procedural_options.seed"),
        ("reasoning_gym:composite", {}, "at least one dataset"),
        ("reasoning_gym:composite", {"datasets": [{"weight": 1}]}, "name"),
        ("reasoning_gym:composite", {"datasets": [{"name": "nothing", "weight": 1}]}, "nothing"),
    ],
)
def test_wrong_tasks_and_options_are_refused(name: str, options: dict, message: str) -> None:
    with pytest.raises(InvalidJob, match=message) as refused:
        open_source(procedural=name, procedural_options=options, field="evaluation")
    assert refused.value.what.startswith("evaluation.procedural")
    assert refused.value.fix


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"size": 2**63}, "size"),
        ({"seed": 2**64}, "seed"),
        ({"min_terms": 10**9}, "min_terms"),
        ({"min_terms": -1e308}, "min_terms"),
    ],
)
def test_numbers_with_which_a_row_would_take_without_end_are_refused(options: dict, field: str) -> None:
    with pytest.raises(InvalidJob, match=rf"data\.procedural_options\.{field}: .*Fix: give "):
        open_source(procedural="reasoning_gym:basic_arithmetic", procedural_options=options)

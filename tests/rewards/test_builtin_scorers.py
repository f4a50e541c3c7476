"""The built-in scorers against answers worked out by hand."""

import json
from typing import Any

import pytest

from millrace.data import open_source
from millrace.rewards import load
from tests.later import Later

reasoning_gym: Any = Later("millrace.rewards.reasoning_gym")

# Tasks whose gold answer is only an example or none at all: their scorer gives it 0.
NO_GOLD = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


def score(name: str, answer: str, truth: object, extra_info: dict | None = None, **options: object) -> float:
    result = load(name, options)(
        data_source="test", solution_str=answer, ground_truth=truth, extra_info=extra_info or {}
    )
    return result["score"] if isinstance(result, dict) else result


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("The answer is 42.", "42", 1.0),
        ("so \\boxed{1/2}", 0.5, 1.0),
        ("0.50", "\\frac{1}{2}", 1.0),
        ("final answer is $\\frac{2}{4}$", "$\\frac12$", 1.0),
        ("$x^2+2x+1$", "(x+1)^2", 1.0),
        ("we get \\boxed{\\text{east}}", "\\text{east}", 1.0),
        ("\\boxed{northwest}", "northwest", 1.0),
        ("43", [42, 43], 1.0),
        ("\\boxed{0.0000001}", 1e-7, 1.0),
        ("x = 41", "42", 0.0),
        ("\\boxed{3} or \\boxed{42}", "42", 0.0),
        ("no idea", "42", 0.0),
        ("", "42", 0.0),
        ("\\boxed{42", "\\boxed{42}", 0.0),
    ],
)
def test_math_compares_values(answer: str, truth: object, expected: float) -> None:
    assert score("math", answer, truth) == expected


def test_math_can_insist_on_a_box() -> None:
    assert score("math", "42", "42", require_boxed=True) == 0.0
    assert score("math", "it is \\boxed{42}", "42", require_boxed=True) == 1.0


@pytest.mark.parametrize("truth", ["", None, []])
def test_math_names_a_ground_truth_that_it_cannot_read(truth: object) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        score("math", "42", truth)


def test_exact_strips_and_compares() -> None:
    assert score("exact", "  cba\n", "cba") == 1.0
    assert score("exact", "CBA", "cba") == 0.0
    assert score("exact", "CBA", "cba", ignore_case=True) == 1.0
    assert score("exact", "7", 7) == 1.0
    assert score("exact", "b", ["a", "b"]) == 1.0
    assert score("exact", "1 then #### 2", "2", extract=r"#### (\d+)") == 1.0
    assert score("exact", "#### 1 then #### 2", "1", extract=r"#### (\d+)") == 0.0
    assert score("exact", "2", "2", extract=r"#### (\d+)") == 0.0
    with pytest.raises(ValueError, match="no ground truth"):
        score("exact", "a", None)


def test_regex_takes_its_pattern_from_the_options_or_the_row() -> None:
    assert score("regex", "it is 12 apples", None, pattern=r"\b\d+\b") == 1.0
    assert score("regex", "it is 12 apples", None, pattern=r"\d+", whole=True) == 0.0
    assert score("regex", "It IS", ["nothing", "it is"], ignore_case=True) == 1.0
    with pytest.raises(ValueError, match="the ground truth is not a regular expression"):
        score("regex", "a", "(")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("<think>\nhm\n</think>\n<answer>4</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<answer>4</answer>", 0.0),
        ("<think>a</think><answer>4</answer> and more", 0.0),
        ("<think>a<think>b</think></think><answer>4</answer>", 0.0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0.0),
    ],
)
def test_format_wants_the_whole_structure(answer: str, expected: float) -> None:
    assert score("format", answer, None) == expected


def test_format_takes_another_pattern() -> None:
    assert score("format", "a\nb", None, pattern="a.b") == 1.0


def test_every_reasoning_gym_task_scores_the_same_after_a_trip_through_json() -> None:
    tasks = sorted(set(reasoning_gym.TASKS) - {"composite"})
    assert len(tasks) > 90
    for task in tasks:
        check_task(task)


def check_task(task: str) -> None:
    data_set = reasoning_gym.create(task, {"seed": 7, "size": 2})
    row = open_source(procedural=f"reasoning_gym:{task}", procedural_options={"seed": 7, "size": 2})[1]
    entry = data_set[1]
    extra_info = json.loads(json.dumps(row.extra_info))
    assert reasoning_gym.unpack(extra_info[reasoning_gym.KEY]["entry"]) == entry, task
    for answer in [a for a in (entry["answer"], "7 x [wrong", "0") if a]:
        try:
            direct = data_set.score_answer(answer, entry)
        except (TypeError, ValueError):
            direct = 0.0  # Some scorers raise at an answer that they cannot parse.
        assert score("reasoning_gym", answer, row.ground_truth, extra_info, tag=None) == direct, task
    if entry["answer"] and task not in NO_GOLD:
        tagged = f"<answer>no</answer> rather <answer>{entry['answer']}</answer>"
        assert score("reasoning_gym", tagged, row.ground_truth, extra_info) == 1.0, task


def test_an_answer_that_a_task_cannot_parse_is_wrong() -> None:
    row = open_source(procedural="reasoning_gym:prime_factorization", procedural_options={"size": 1})[0]
    result = load("reasoning_gym", {"tag": None})(
        data_source="", solution_str="two × two", ground_truth=row.ground_truth, extra_info=row.extra_info
    )
    assert result["score"] == 0.0 and result["unreadable"].startswith("ValueError")


def test_reasoning_gym_needs_the_tag_and_the_entry() -> None:
    row = open_source(procedural="reasoning_gym:spell_backward", procedural_options={"size": 1})[0]
    assert score("reasoning_gym", row.ground_truth, row.ground_truth, row.extra_info) == 0.0
    with pytest.raises(ValueError, match="not from this source"):
        score("reasoning_gym", "<answer>a</answer>", "a", {"index": 3})


def test_packing_keeps_what_json_loses() -> None:
    value = {"a": (1, (2,)), "b": {3: "x", (0, 1): {4, 5}}, "c": [None, True, 1.5], "__tuple__": 9}
    restored = reasoning_gym.unpack(json.loads(json.dumps(reasoning_gym.pack(value))))
    assert restored == value
    assert type(restored["a"]) is tuple and type(restored["c"][1]) is bool
    with pytest.raises(TypeError, match="object"):
        reasoning_gym.pack({"a": object()})

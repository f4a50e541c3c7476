"""Test cases of programs: the forms of rows, comparison of results, and answers against values worked out by hand."""

import json

import pytest

from millrace.errors import InvalidJob
from millrace.rewards import check, load
from millrace.rewards.programs import limits
from millrace.rewards.programs.cases import Call, Output, Statements, cases_of, same_text, same_value
from millrace.rewards.programs.scorer import code_of
from millrace.sandbox import program

contained = pytest.mark.skipif(bool(program.missing()), reason="this machine does not give every boundary")
ADDS = "Here it is:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\nDone."
SUMS = {"inputs": ["1 2\n", "3 4\n", "5 6\n", "0 0\n"], "outputs": ["3\n", "7", "11 \n", "0"]}


def block(code: str) -> str:
    return f"```python\n{code}\n```"


@pytest.mark.parametrize(
    ("truth", "expected"),
    [
        ({"inputs": ["1\n"], "outputs": ["2\n"]}, [Output("1\n", "2\n")]),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, [Output("1\n2", "3")]),
        ('{"inputs": ["1"], "outputs": [2]}', [Output("1", "2")]),
        ({"inputs": ["[1]\n2"], "outputs": ["[3]"], "fn_name": "f"}, [Call("f", [[1], 2], [3])]),
        ({"inputs": [[[1], 2]], "outputs": [["x"]], "fn_name": "f"}, [Call("f", [[1], 2], ["x"])]),
        ([{"input": "1", "output": "2"}], [Output("1", "2")]),
        ([{"input": [1], "output": "word", "fn_name": "f"}], [Call("f", [1], "word")]),
        ({"assert_case": ["assert a"], "inputs": [""]}, [Statements("\nassert a")]),
        ({"test_list": ["assert a"], "test_setup_code": "b = 1"}, [Statements("b = 1\nassert a")]),
        (["assert a", "assert b"], [Statements("assert a"), Statements("assert b")]),
        ({"test": "def check(f): ...", "entry_point": "f"}, [Statements("def check(f): ...\ncheck(f)", "", "f")]),
    ],
)
def test_rows_have_their_cases_in_the_forms_of_data_sets(truth: object, expected: list[object]) -> None:
    assert cases_of(truth) == expected


@pytest.mark.parametrize(
    "truth",
    ["4", "assert f(1)", None, {}, [], 3, {"inputs": ["1"]}, {"inputs": ["1"], "outputs": []}, [{"input": 1}], [[1]]],
)
def test_a_row_without_test_cases_is_named(truth: object) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        cases_of(truth)


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("3\n", "3", True),
        ("1  2 \n3\n\n", "1 2\n3", True),
        ("1 2 3", "1 2\n3", False),
        ("1\n\n2", "1\n2", False),
        ("0.3333333", "0.33333333", True),
        ("0.33", "0.3333", False),
        ("1000000001", "1000000000", False),
        ("nan", "0.5", False),
        ("", "0", False),
        ("YES", "Yes", False),
    ],
)
def test_printed_text_is_compared_by_words_and_lines(printed: str, expected: str, same: bool) -> None:
    assert same_text(printed, expected) is same


@pytest.mark.parametrize(
    ("returned", "expected", "same"),
    [
        ([1, [2.0000000001, "a"]], [1, [2.0, "a"]], True),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (True, 1, False),
        (1, True, False),
        (1, 1.0, True),
        ("1", 1, False),
        ([1], [1, 2], False),
        (None, None, True),
    ],
)
def test_values_are_compared_with_their_types(returned: object, expected: object, same: bool) -> None:
    assert same_value(returned, expected) is same


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (ADDS, "a, b = map(int, input().split())\nprint(a + b)\n"),
        ("```py\n1\n```\nor better\n```\n2\n```", "2\n"),
        ("```python\n1\n```\n```cpp\nint a;\n```\n", "1\n"),
        ("```python\ncut off", "cut off"),
        ("print(1)", None),
        ("```cpp\nint a;\n```", None),
    ],
)
def test_the_last_block_in_python_is_the_code(answer: str, code: str | None) -> None:
    assert code_of(answer) == code


def test_wrong_options_are_refused_by_name() -> None:
    for options in ({"score": "some"}, {"timeout_s": 0}, {"timeout_s": "6"}, {"memory_mb": 1}, {"max_cases": 0}):
        with pytest.raises(InvalidJob, match=rf"reward\.options: .*{next(iter(options))} has to be"):
            check("code", options)


def test_a_call_leaves_time_to_answer() -> None:
    assert limits.CallLimits(30.0).budget_s == 25.0
    assert limits.CallLimits(1.0).budget_s == pytest.approx(0.8)


def scored(answer: str, truth: object, **options: object) -> dict:
    return load("code", options)(data_source="apps", solution_str=answer, ground_truth=truth, extra_info={})


@contained
def test_the_score_is_the_share_of_passed_cases_or_all_or_nothing() -> None:
    assert scored(ADDS, json.dumps(SUMS)) == {"score": 1.0, "passed": 4, "cases": 4, "failed": None}
    half = block("a, b = map(int, input().split())\nprint(a + b if a < 3 else 0)")
    told = scored(half, SUMS)
    assert (told["score"], told["passed"]) == (0.5, 2)
    assert told["failed"] == "case 2: the result is not the expected one"
    assert scored(half, SUMS, score="all")["score"] == 0.0
    assert scored(half, SUMS, score="all", max_cases=1)["score"] == 1.0
    assert scored("It is 3.", SUMS) == {"score": 0.0, "passed": 0, "cases": 4, "failed": "the answer has no code block"}


@contained
@pytest.mark.parametrize("code", ["print('\ud83d')", "print(1)\0", "x = (" + "(" * 10_000, "print(" * 200, "\f\r"])
def test_code_that_is_no_python_is_a_wrong_answer(code: str) -> None:
    assert scored(block(code), {"inputs": ["\ud83d"], "outputs": ["1"]})["score"] == 0.0
    assert scored(ADDS, SUMS)["score"] == 1.0


@contained
def test_functions_and_methods_are_called_with_arguments() -> None:
    truth = {"fn_name": "pair", "inputs": ["3\n4", "5\n6"], "outputs": ["[3, 7]", "[[5, 11]]"]}
    assert scored(block("def pair(a: int, b: int):\n    return a, a + b"), truth)["score"] == 1.0
    method = "class Solution:\n    def pair(self, a, b) -> List[int]:\n        return [a, b]"
    told = scored(block(f"{method}\nif __name__ == '__main__':\n    raise SystemExit"), truth)
    assert (told["score"], told["failed"]) == (0.0, "case 1: the result is not the expected one")
    told = scored(block("def other(): pass"), truth)
    assert told["failed"].startswith("case 1: it ended with status 1: AttributeError")


@contained
def test_statements_have_to_run_to_their_end() -> None:
    mbpp = {"test_list": ["assert twice(2) == four", "assert twice(1) == 3"], "test_setup_code": "four = 4"}
    told = scored(block("def twice(x): return 2 * x"), mbpp)
    assert (told["score"], told["failed"]) == (0.5, "case 2: it ended with status 1: AssertionError")
    for leaves in ("import os\nos._exit(0)", "exit()", "import os\nos.write(3, b'passed')\nos._exit(0)"):
        assert scored(block(leaves), mbpp)["score"] == 0.0


@contained
def test_an_answer_may_continue_the_prompt_of_its_row() -> None:
    truth = {"test": "def check(f):\n    assert f(2) == 4", "entry_point": "twice", "prompt": "def twice(x):\n"}
    assert scored("```\n    return 2 * x\n```", truth)["score"] == 1.0
    assert scored(block("def twice(x):\n    return x + x"), truth)["score"] == 1.0
    assert scored(block("def twice(x):\n    return x"), truth)["score"] == 0.0

"""Answers scored by the rule of their data source, against values worked out by hand."""

import pytest

from millrace.errors import InvalidJob
from millrace.rewards import choose, load
from millrace.rewards.data_sources import PROGRAMS, RULES, Rule, rule_of
from millrace.sandbox import program

DEFAULTS_OF_VERL = (
    "openai/gsm8k",
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "math_dapo",
    "math",
    "math_dapo_reasoning",
    "aime2024",
    "numina_aops_forum",
    "numina_synthetic_math",
    "numina_amc_aime",
    "numina_synthetic_amc",
    "numina_cn_k12",
    "numina_olympiads",
    "codecontests",
    "apps",
    "codeforces",
    "taco",
    "hiyouga/geometry3k",
    "searchR1_nq",
    "searchR1_triviaqa",
    "searchR1_popqa",
    "searchR1_hotpotqa",
    "searchR1_2wikimultihopqa",
    "searchR1_musique",
    "searchR1_bamboogle",
)
"""Every name that verl 0.8 knows."""


@pytest.mark.parametrize("source", DEFAULTS_OF_VERL)
def test_every_name_of_verl_has_a_rule(source: str) -> None:
    assert rule_of(source) is not None


@pytest.mark.skipif(bool(program.missing()), reason="this machine does not give every boundary")
@pytest.mark.parametrize("source", PROGRAMS)
def test_programs_are_run_against_the_first_ten_cases(source: str) -> None:
    truth = {"inputs": [str(n) for n in range(12)], "outputs": [str(n) for n in range(12)]}
    answer = "```python\nn = int(input())\nprint(n if n != 3 else 0, end='' if n < 10 else 'x')\n```"
    given = load("by_data_source")(data_source=source, solution_str=answer, ground_truth=truth, extra_info={})
    assert (given["score"], given["passed"], given["cases"]) == (0.9, 9, 10)


@pytest.mark.parametrize(
    ("source", "answer", "truth", "expected"),
    [
        ("openai/gsm8k", "3 + 4 = 7\n#### 7", "7", 1.0),
        ("openai/gsm8k", "#### 3\n#### 1,234.", "1234", 1.0),
        ("openai/gsm8k", "#### $-12", "-12", 1.0),
        ("openai/gsm8k", "the answer is 7", "7", 0.0),
        ("openai/gsm8k", "#### 7\n" + "x" * 300, "7", 0.0),
        ("openai/gsm8k", "#### 8", "7", 0.0),
        ("lighteval/MATH", r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("HuggingFaceH4/MATH-500", "the answer is 0.5", "0.5", 0.0),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{2}", "3", 0.0),
        ("math_dapo", "Answer: 3\nAnswer: 34", "34", 1.0),
        ("math_dapo", "answer: $34$", "34", 1.0),
        ("math_dapo", "Answer: 35", "34", -1.0),
        ("math", "Answer: 34", "34", 1.0),
        ("numina_olympiads", r"so the answer is \boxed{34}", "34", 1.0),
        ("numina_cn_k12", "The answer is 34.", "34", 1.0),
        ("aime2024", "it is 34", "34", -1.0),
        ("aime_2025", "x\nAnswer: \\boxed{34}", "34", 1.0),
        ("hiyouga/geometry3k", r"<think>so</think> \boxed{3}", "3", 1.0),
        ("hiyouga/geometry3k", r"\boxed{3}", "3", 0.9),
        ("hiyouga/geometry3k", r"<think>so</think> \boxed{4}", "3", 0.1),
        ("searchR1_nq", "<answer>a</answer><answer>The Beatles!</answer>", {"target": ["beatles", "Fab Four"]}, 1.0),
        ("searchR1_musique", "The Beatles", {"target": ["beatles"]}, 0.0),
        ("searchR1_hotpotqa", "<answer>beat les</answer>", {"target": "beatles"}, 0.0),
    ],
)
def test_each_data_source_has_its_rule(source: str, answer: str, truth: object, expected: float) -> None:
    given = load("by_data_source")(data_source=source, solution_str=answer, ground_truth=truth, extra_info={})
    assert given["score"] == pytest.approx(expected)


@pytest.mark.parametrize("source", ["our/data", "searchR1_other"])
def test_a_data_source_without_a_rule_is_refused_by_name(source: str) -> None:
    with pytest.raises(InvalidJob, match=rf'reward\.function: "by_data_source": .*{source}') as refused:
        choose("by_data_source", procedural=False, data_source=source)
    assert refused.value.fix
    with pytest.raises(ValueError, match=source):
        load("by_data_source")(data_source=source, solution_str="a", ground_truth="a", extra_info={})


@pytest.mark.parametrize("source", [*RULES, "aime25"])
def test_a_row_without_ground_truth_is_a_failure_and_not_a_score(source: str) -> None:
    assert choose("by_data_source", procedural=False, data_source=source) == "by_data_source"
    missing = "no test cases|none of inputs" if rule_of(source) is Rule.PROGRAM else "no ground truth"
    with pytest.raises(ValueError, match=missing):
        load("by_data_source")(data_source=source, solution_str="a", ground_truth=None, extra_info={})

"""Conversions of small files with the published schemas, read back as a job reads them, and their rewards."""

import json
from pathlib import Path

import pytest

from millrace.data import PromptRow, open_source
from millrace.data.columns.layout import Reading
from millrace.errors import BadRow, InvalidJob, MillraceError
from millrace.rewards import load
from recipes import geometry3k, gsm8k
from recipes.data_sets import DATA_SETS, converted, data_set
from tests.image_models import picture
from tests.recipes.published import PROBLEMS, SUM_TRUTHS, SUMS, dapo_file, geometry_file, gsm8k_file


def read(file: Path) -> list[PromptRow]:
    return list(open_source([file]))


def score(answer: str, row: PromptRow, **options: object) -> float:
    given = load("math", options)(
        data_source=row.data_source, solution_str=answer, ground_truth=row.ground_truth, extra_info=row.extra_info
    )
    return float(given["score"] if isinstance(given, dict) else given)


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> list[PromptRow]:
    folder = tmp_path_factory.mktemp("gsm8k")
    assert converted(str(gsm8k_file(folder / "test.parquet")), gsm8k.rows, folder / "out" / "train.parquet") == 4
    return read(folder / "out" / "train.parquet")


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> list[PromptRow]:
    folder = tmp_path_factory.mktemp("dapo")
    more = (("Compute $1 + 1$.", "2"), ("Compute $1 + 1$.", "3"))
    source = str(dapo_file(folder / "dapo.parquet", more=more))
    assert converted(source, DATA_SETS["dapo-math"].rows, folder / "train.parquet") == 3
    return read(folder / "train.parquet")


def test_gsm8k_asks_the_question_and_takes_the_number_after_the_hashes(sums: list[PromptRow]) -> None:
    assert tuple(row.ground_truth for row in sums) == SUM_TRUTHS
    assert [row.prompt for row in sums] == [
        [{"role": "user", "content": f"{question}\n\n{gsm8k.INSTRUCTION}"}] for question, _ in SUMS
    ]
    assert {row.data_source for row in sums} == {"openai/gsm8k"} and {row.reward_style for row in sums} == {"rule"}


def test_json_lines_are_converted_to_the_same_rows(sums: list[PromptRow], tmp_path: Path) -> None:
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in SUMS]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    converted(str(tmp_path / "train.jsonl"), gsm8k.rows, tmp_path / "out.parquet")
    assert read(tmp_path / "out.parquet") == sums


def test_dapo_math_has_every_problem_once_and_none_with_two_answers(problems: list[PromptRow]) -> None:
    assert [row.ground_truth for row in problems] == [truth for _, truth in PROBLEMS]
    for row, (problem, _) in zip(problems, PROBLEMS, strict=True):
        (message,) = row.prompt
        assert isinstance(message, dict) and f"\n\n{problem}\n\n" in message["content"]
    assert {row.data_source for row in problems} == {"math_dapo"} and {row.reward_style for row in problems} == {"rule"}


def test_geometry3k_keeps_its_images_and_places_and_its_answers_earn_the_reward(tmp_path: Path) -> None:
    rows = DATA_SETS["geometry3k"].rows
    assert converted(str(geometry_file(tmp_path / "published.parquet")), rows, tmp_path / "train.parquet") == 2
    one, two = open_source([tmp_path / "train.parquet"], reading=Reading(most_images=2))
    assert [one.images, two.images] == [(picture(0, 40, 30),), (picture(1, 40, 30), picture(2, 40, 30))]
    (message,) = two.prompt
    assert isinstance(message, dict)
    kinds = [part["type"] if part["type"] == "image" else part["text"] for part in message["content"]]
    assert kinds == ["image", "Find y, where ", "image", f".\n\n{geometry3k.INSTRUCTION}"]
    score = load("by_data_source", {})
    for row, said, earned in ((one, "2\\sqrt{221}", 1.0), (one, "221", 0.1), (two, "4", 1.0)):
        answer = f"<think>Look.</think> It is \\boxed{{{said}}}."
        given = {"data_source": row.data_source, "ground_truth": row.ground_truth, "extra_info": row.extra_info}
        found = score(solution_str=answer, **given)
        assert float(found["score"] if isinstance(found, dict) else found) == pytest.approx(earned)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"answer": " "}, "answer: has no text"),
        ({"images": []}, "fewer images"),
        ({"problem": "Find y."}, "more images"),
    ],
)
def test_a_geometry_row_that_cannot_be_used_stops_the_conversion(
    changed: dict[str, object], told: str, tmp_path: Path
) -> None:
    source = geometry_file(tmp_path / "published.parquet", **changed)
    with pytest.raises(BadRow, match=told):
        converted(str(source), geometry3k.rows, tmp_path / "train.parquet")
    assert not (tmp_path / "train.parquet").exists()


@pytest.mark.parametrize("number", range(len(SUMS)))
def test_the_reward_reads_gsm8k_answers(sums: list[PromptRow], number: int) -> None:
    row, worked_out = sums[number], SUMS[number][1]
    assert score(worked_out, row) == 1.0  # of the data set itself, ending in #### 1,080
    assert score(f"So it is \\boxed{{{row.ground_truth}}}.", row, require_boxed=True) == 1.0
    assert score("So it is \\boxed{77}.", row, require_boxed=True) == 0.0
    assert score("#### 77", row) == 0.0 and score(worked_out, row, require_boxed=True) == 0.0


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("Answer: 1,080", True),
        ("\\boxed{1,080}", True),
        ("\\boxed{\\$1080}", True),
        ("\\boxed{1080.00}", True),
        ("\\boxed{1080\\text{ seats}}", True),
        ("\\boxed{108}", False),
        ("", False),
    ],
)
def test_the_reward_reads_numbers_as_people_write_them(sums: list[PromptRow], said: str, right: bool) -> None:
    assert score(said, sums[1]) == float(right)


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("Answer: 34", True),
        ("Answer: $34$", True),
        ("Answer: $34", True),
        ("**Answer:** 34", True),
        ("Answer: \\boxed{34}", True),
        ("Since $a = 30$ and $b = 4$, the sum is $34$.\n\nAnswer: 34", True),
        ("It is not 33, as $30 + 4 = 34$.\nAnswer: 34.", True),
        ("Answer: 33", False),
        ("The sum is $34$.\n\nAnswer: 33", False),
        ("I do not know.", False),
    ],
)
def test_the_reward_reads_dapo_answers(problems: list[PromptRow], said: str, right: bool) -> None:
    assert score(said, problems[0]) == float(right)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"question": "How many?", "answer": "It is 24."}, "line 1, column answer: has no number after ####"),
        ({"question": "How many?"}, "line 1: has no text in question and answer"),
        ([], "line 1: has no text in question and answer"),
    ],
)
def test_a_row_that_cannot_be_converted_is_named_and_nothing_is_written(line: object, why: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(line))
    with pytest.raises(BadRow, match=why):
        converted(str(tmp_path / "train.jsonl"), gsm8k.rows, tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


def test_a_source_of_another_data_set_is_refused_with_its_columns(tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match="has no column question, answer"):
        converted(str(dapo_file(tmp_path / "dapo.parquet")), gsm8k.rows, tmp_path / "out.parquet")
    with pytest.raises(InvalidJob, match="has no column prompt or messages; it has question, answer"):
        converted(str(gsm8k_file(tmp_path / "a.parquet")), DATA_SETS["dapo-math"].rows, tmp_path / "out.parquet")


def test_a_source_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidJob, match="there is no such file"):
        converted(str(tmp_path / "none.parquet"), gsm8k.rows, tmp_path / "out.parquet")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(MillraceError, match="has no rows"):
        converted(str(tmp_path / "empty.jsonl"), gsm8k.rows, tmp_path / "out.parquet")
    with pytest.raises(InvalidJob, match="choose one of gsm8k, dapo-math, geometry3k"):
        data_set("gsm")

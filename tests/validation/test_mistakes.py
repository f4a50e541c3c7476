"""What pydantic finds wrong is told in plain words, also to those who validate something else than a job spec."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from millrace.errors import InvalidJob, Mistake, wrong_value
from millrace.spec import parse
from millrace.spec.rollout import Rollout
from millrace.validation.fields import OneOf, StrictModel
from millrace.validation.kinds import kind_of
from millrace.validation.mistakes import InvalidValue, explain
from millrace.validation.names import choose, closest


class Inner(StrictModel):
    colour: Literal["red", "green"] = "red"
    colours: list[Literal["red", "green"]] = Field(default_factory=list)
    shape: Annotated[str, OneOf(("round", "square"))] = "round"


class Outer(StrictModel):
    inner: Inner = Field(Inner(), examples=[{"colour": "green"}])
    count: int = Field(1, ge=1, lt=10)
    words: list[str] = Field(["a"], min_length=1, max_length=2)


def told(tree: Any, model: type[BaseModel] = Outer, above: str = "") -> list[str]:
    with pytest.raises(ValidationError) as error:
        model.model_validate(tree)
    return [str(mistake) for mistake in explain(error.value.errors(), model, above)]


@pytest.mark.parametrize(
    ("tree", "line"),
    [
        ({"count": 1.5}, "count: 1.5: is not a whole number. Fix: give a whole number."),
        ({"count": "x"}, 'count: "x": is not a whole number. Fix: give a whole number.'),
        ({"count": 0}, "count: 0: is less than 1. Fix: give a number that is at least 1."),
        ({"count": 10}, "count: 10: is not less than 10. Fix: give a number that is less than 10."),
        ({"words": []}, "words: []: has fewer than 1 entries. Fix: give at least 1."),
        ({"words": ["a", "b", "c"]}, 'words: ["a", "b", "c"]: has more than 2 entries. Fix: give at most 2.'),
        ({"words": [1]}, "words.0: 1: is not text. Fix: give text."),
        ({"inner": 3}, "inner: 3: is not a mapping. Fix: give a mapping, for example `inner: {colour: green}`, or"),
        (
            {"inner": {"colour": "grean"}},
            'colour: "grean": is not one of the known values. Fix: did you mean `green`?',
        ),
        ({"inner": {"colour": "blue"}}, "Fix: choose one of red, green."),
        ({"inner": {"colours": ["red", "gren"]}}, "Fix: did you mean `green`? Choose one of red, green."),
        ({"inner": {"shape": "squared"}}, "Fix: did you mean `square`? Choose one of round, square."),
        ({"inner": {"color": "red"}}, "inner.color: there is no such field. Fix: did you mean `colour`?"),
        ({"colour": "red"}, "colour: there is no such field. Fix: did you mean `inner.colour`?"),
    ],
)
def test_a_mistake_is_told_without_a_name_of_pydantic_s_or_python_s(tree: Any, line: str) -> None:
    (found,) = told(tree)
    assert line in found


def test_without_a_model_the_values_are_still_told() -> None:
    adapter = TypeAdapter(Annotated[int, Field(ge=1)])
    with pytest.raises(ValidationError) as error:
        adapter.validate_python(0)
    (mistake,) = explain(error.value.errors(), above="limit")
    assert mistake == Mistake("limit", "is less than 1", "give a number that is at least 1.", "0")
    with pytest.raises(ValidationError) as error:
        TypeAdapter(Literal["up", "down"]).validate_python("left")
    (mistake,) = explain(error.value.errors(), above="sort")
    assert str(mistake) == "sort: \"left\": is not one of the known values. Fix: give 'up' or 'down'."


def test_the_path_above_comes_first() -> None:
    (line,) = told({"inner": {"colour": 1}}, above="a.b")
    assert line.startswith("a.b.inner.colour: 1: ")


def test_a_validator_may_tell_its_mistakes_itself() -> None:
    raised = InvalidValue(wrong_value("x.y", 3, "is odd", "give an even number."))
    details: Any = {"type": "value_error", "loc": ("x",), "msg": "", "input": 3, "ctx": {"error": raised}}
    assert [str(each) for each in explain([details])] == ["x.y: 3: is odd. Fix: give an even number."]


def test_an_error_of_a_kind_that_nobody_thought_of_is_not_told_in_pydantic_s_words() -> None:
    details: Any = {"type": "is_instance_of", "loc": ("x",), "msg": "Input should be an instance of Foo", "input": 3}
    assert [str(each) for each in explain([details])] == [
        "x: 3: is not valid. Fix: give another value, or leave it out."
    ]


def test_one_error_holds_all_mistakes() -> None:
    with pytest.raises(InvalidJob) as error:
        parse({"name": "x", "model": {}, "data": {"files": ["a"]}, "rollout": {"top_p": 2}})
    assert [mistake.field for mistake in error.value.mistakes] == ["model.path", "rollout.top_p"]
    lone = InvalidJob("something is wrong.", "change it.")
    assert str(lone) == str(lone.mistakes[0]) == "something is wrong. Fix: change it."


def test_a_long_value_is_shortened() -> None:
    assert len(str(wrong_value("field", "x" * 10_000, "is long", "shorten it."))) < 300


def test_names_are_matched_in_any_case_and_by_other_frameworks() -> None:
    assert closest("VLLM", ("sglang", "vllm")) == "vllm" and closest("tgi", ("sglang", "vllm")) is None
    assert closest("n", tuple(Rollout.model_fields)) == "samples_per_prompt"
    assert choose("tgi", ("sglang", "vllm")) == "choose one of sglang, vllm."


def test_kinds_have_plain_names() -> None:
    values = (None, True, "a", 1, 1.5, {}, [], (), b"")
    names = ["null", "true", "text", "a whole number", "a number", "a mapping", "a list", "a list", "bytes"]
    assert [kind_of(value) for value in values] == names

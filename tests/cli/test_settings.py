"""`--set`: values, and sweeps over several values."""

from typing import Any

import pytest

from millrace.cli.settings import applied, changes_of, split, variants_of
from millrace.errors import InvalidJob


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1", ["1"]),
        ("1,2,3", ["1", "2", "3"]),
        ("[1,2]", ["[1,2]"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("{a: 1, b: 2}", ["{a: 1, b: 2}"]),
        ('"a,b"', ['"a,b"']),
        ("'a,b',c", ["'a,b'", "c"]),
        ("don't,do", ["don't", "do"]),
        ("", [""]),
    ],
)
def test_commas_outside_of_brackets_and_quotes_are_between_values(text: str, values: list[str]) -> None:
    assert split(text) == values


def test_a_sweep_is_every_combination_with_its_values_in_the_name() -> None:
    found = variants_of(["trainer.optimizer.lr=1e-6,3e-6", "data.seed=1,2", "schedule.steps=5"])
    assert [each.suffix for each in found] == [f"lr-{lr}.seed-{seed}" for lr in ("1e-6", "3e-6") for seed in (1, 2)]
    last = {"trainer": {"optimizer": {"lr": 3e-6}}, "data": {"seed": 2}, "schedule": {"steps": 5}}
    assert found[-1].changes == last
    assert variants_of(["a.lr=1,2", "b.lr=3,4"])[0].suffix == "a.lr-1.b.lr-3"
    assert variants_of(["a=[1,2]"])[0].suffix == ""


@pytest.mark.parametrize(
    ("output", "expected"),
    [("/runs/a", "/runs/a/lr-1"), ("/runs/{name}", "/runs/{name}"), ("/runs/{id}", "/runs/{id}"), (None, None)],
)
def test_jobs_of_a_sweep_have_names_and_folders_of_their_own(output: str | None, expected: str | None) -> None:
    tree: dict[str, Any] = {"name": "sums"} | ({} if output is None else {"output": output})
    changes = applied(tree, variants_of(["lr=1,2"])[0])
    assert (changes["name"], changes.get("output", output)) == ("sums-lr-1", expected)
    assert applied(tree, variants_of(["lr=1"])[0]) == {"lr": 1}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["lr"], "has no field and value"),
        (["lr=1,"], "one of its values is empty"),
        (["lr=1", "lr.x=2"], "lr has a value already"),
        ([f"{name}=1,2,3,4,5,6,7" for name in "abc"], "would be 343 jobs"),
    ],
)
def test_settings_that_cannot_be_read(settings: list[str], told: str) -> None:
    with pytest.raises(InvalidJob, match=told):
        variants_of(settings)


def test_other_commands_take_one_value() -> None:
    assert changes_of(["a.b=[1,2]"]) == {"a": {"b": [1, 2]}} and changes_of(None) == {}
    with pytest.raises(InvalidJob, match="has 2 values, and only `millrace submit`"):
        changes_of(["a.b=1,2"])

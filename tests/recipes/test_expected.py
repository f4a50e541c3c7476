"""README.md's table beside the formulas."""

import pytest

from millrace.megatron.architectures.published import PUBLISHED
from millrace.memory.layers import parameters
from recipes.catalogue import HERE, RECIPES, Recipe
from recipes.expected import table_row


@pytest.mark.parametrize(
    ("shape", "millions"), [("qwen3-0.6b", 596), ("qwen3-1.7b", 1720), ("qwen3-8b", 8190), ("qwen2.5-vl-7b", 7615)]
)
def test_parameters_are_those_of_the_published_models(shape: str, millions: int) -> None:
    assert round(parameters(PUBLISHED[shape]) / 1e6) == pytest.approx(millions, abs=1)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_the_page_has_what_the_formulas_give(recipe: Recipe) -> None:
    assert table_row(recipe) in (HERE / "README.md").read_text().splitlines()

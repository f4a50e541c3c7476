"""The formulas beside what BENCHMARKS.md measured, and README.md's table beside the formulas."""

from dataclasses import replace

import pytest

from millrace.bench.shapes import shape_of
from millrace.megatron.architectures.shape import ModelShape
from recipes.catalogue import HERE, RECIPES, Recipe
from recipes.expected import Layout, memory_bytes, parameters, table_row

EIGHT, TWELVE_LAYERS = shape_of("qwen3-8b"), replace(shape_of("qwen3-8b"), layers=12)
SMALL_VOCABULARY = replace(shape_of("qwen3-1.7b"), vocabulary=512)
MEASURED = (
    (EIGHT, Layout("fsdp2", 1, 1, True, 16384, False), 146.0),
    (TWELVE_LAYERS, Layout("fsdp2", 1, 1, False, 16384, False), 91.0),
    (TWELVE_LAYERS, Layout("megatron", 1, 1, False, 16384, False), 96.0),
    (SMALL_VOCABULARY, Layout("fsdp2", 1, 1, False, 16384, False), 56.0),
    (SMALL_VOCABULARY, Layout("megatron", 1, 1, False, 16384, False), 59.0),
    (EIGHT, Layout("megatron", 2, 1, True, 4096, False), 102.6 * 1.073741824),
)
"""Peaks of BENCHMARKS.md in GB: "FSDP2 beside Megatron-Core", and DP2 of "The megatron backend on GPUs" (in GiB)."""


@pytest.mark.parametrize(("shape", "used", "measured_gb"), MEASURED)
def test_memory_is_within_a_tenth_of_what_was_measured(shape: ModelShape, used: Layout, measured_gb: float) -> None:
    assert memory_bytes(shape, used) / 1e9 == pytest.approx(measured_gb, rel=0.1)


@pytest.mark.parametrize(("shape", "millions"), [("qwen3-0.6b", 596), ("qwen3-1.7b", 1720), ("qwen3-8b", 8190)])
def test_parameters_are_those_of_the_published_models(shape: str, millions: int) -> None:
    assert round(parameters(shape_of(shape)) / 1e6) == pytest.approx(millions, abs=1)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_the_page_has_what_the_formulas_give(recipe: Recipe) -> None:
    assert table_row(recipe) in (HERE / "README.md").read_text().splitlines()

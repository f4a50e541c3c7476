"""Models with a tower take what is published under the names that their own loader knows."""

from types import SimpleNamespace
from typing import Any

import pytest

from services.rollout.weights.in_worker.model import loader_name

OF_THE_FOLDER = {"model.visual.": "visual.", "lm_head.": "language_model.lm_head."}
OF_THE_FOLDER |= {"model.language_model.": "language_model.model."}


def model(prefixes: dict[str, str]) -> Any:
    return SimpleNamespace(hf_to_vllm_mapper=SimpleNamespace(orig_to_new_prefix=prefixes))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.mlp.down_proj.weight", "model.language_model.layers.0.mlp.down_proj.weight"),
        ("model.language_model.norm.weight", "model.language_model.norm.weight"),
        ("model.visual.merger.norm.weight", "model.visual.merger.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_a_wrapper_that_knows_the_folder_s_names(name: str, expected: str) -> None:
    """Qwen3.5 in vLLM 0.26, which has no class for its language model alone."""
    assert loader_name(name, model(OF_THE_FOLDER)) == expected


@pytest.mark.parametrize("other", [SimpleNamespace(), model({}), model({**OF_THE_FOLDER, "model.": "language_model."})])
def test_others_take_the_published_name(other: Any) -> None:
    assert loader_name("model.norm.weight", other) == "model.norm.weight"

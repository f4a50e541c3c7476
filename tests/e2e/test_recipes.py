"""Recipes over all services: converted data, the recipe's own spec, a tiny random model, two steps."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.client import Client
from millrace.spec.document import merged
from recipes.catalogue import WITH_IMAGES, recipe
from recipes.run import prepared
from tests.e2e.conftest import adds_up, finished
from tests.image_models import save_image_model
from tests.recipes.published import FILES

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(600)]
"""tests/recipes/test_jobs.py has the specs, their data and `validate`; test_algorithms.py trains with all services."""

SMALLER: dict[str, Any] = {
    "data": {"max_prompt_tokens": 400},
    "rollout": {
        "samples_per_prompt": 2,
        "max_response_tokens": 16,
        "dtype": "float32",
        "engine_options": {"max_model_len": None, "max_num_seqs": 16},
    },
    "trainer": {"dtype": "float32", "token_budget": 2048, "optimizer": {"warmup_steps": 1}},
    "schedule": {"steps": 2, "prompts_per_step": 2},
    "evaluation": {"prompts": 2, "samples_per_prompt": 1, "every_steps": 1},
    "reward": {"workers": 1},
}
"""Sizes for a model of two layers on a CPU."""
OF_ONE = {
    "qwen3-0.6b-fsdp2": {},
    # One rank; and random answers are all wrong, so that no group has a signal.
    "qwen3-8b-megatron": {
        "algorithm": {"drop_groups_without_signal": False, "overlong_buffer_tokens": 4},
        "trainer": {"backend_options": {"tensor_parallel": 1}},
    },
}


@pytest.mark.parametrize("name", OF_ONE)
def test_a_recipe_trains_two_steps(name: str, client: Client, model: Path, tmp_path: Path) -> None:
    chosen = recipe(name)
    source = str(FILES[chosen.data](tmp_path / "published.parquet"))
    long = Path(shutil.copytree(model, tmp_path / "model"))
    config = json.loads((long / "config.json").read_text())
    (long / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40960}))

    job = prepared(chosen, tmp_path, str(long), source, source, merged(SMALLER, OF_ONE[name]))

    submitted = client.submit(yaml.safe_load(job.read_text()))
    view = finished(client, submitted.id)
    adds_up(client, view, groups_per_step=2)
    assert view.evaluation_before is not None and view.evaluation_last is not None
    rows = client.metrics(submitted.id)
    assert all(math.isfinite(value) for row in rows for value in row.values.values())
    told = set().union(*(row.values for row in rows))
    assert {"critic/score/mean", "response_length/clip_ratio", "rollout_corr/k3_kl", "actor/grad_norm"} <= told
    assert any(key.startswith("val-core/") for key in told)


def test_a_recipe_with_images_trains_two_steps(start: Any, tmp_path: Path) -> None:
    folder = save_image_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 4096
    (folder / "config.json").write_text(json.dumps(config))
    source = str(FILES[WITH_IMAGES.data](tmp_path / "published.parquet"))

    job = prepared(
        WITH_IMAGES, tmp_path, str(folder), source, source, merged(SMALLER, {"model": {"lora": {"rank": 4}}})
    )

    client = start(replicas=1, ranks=1, engine="vllm").client()
    submitted = client.submit(yaml.safe_load(job.read_text()))
    view = finished(client, submitted.id)
    adds_up(client, view, groups_per_step=2)
    assert view.evaluation_last is not None
    assert (Path(str(view.checkpoint)) / "adapter" / "adapter_model.safetensors").is_file()

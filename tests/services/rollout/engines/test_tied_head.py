"""A pool's model whose config ties the output layer, and whose folder stores one of its own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace.errors import InvalidJob
from millrace.spec.pool import Pool, PoolTask
from services.rollout.engine import PoolModel
from services.rollout.engines.options import check_tied_head
from services.rollout.engines.transformers.model import load
from tests.models import save_tiny_model

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def held(folder: Path) -> PoolModel:
    pool = Pool(name="teacher", path=str(folder), dtype="float32")
    return PoolModel(pool, PoolTask.LOGPROBS, "pools.0", 1.0, None, longest=60)


def add(folder: Path, name: str, tensor: torch.Tensor) -> None:
    (file,) = folder.glob("*.safetensors")
    save_file({**load_file(file), name: tensor}, file, metadata={"format": "pt"})


def test_another_head_than_the_embedding_is_refused_by_name(tmp_path: Path) -> None:
    model = held(save_tiny_model(tmp_path, tied=True))
    embedding = load_file(next(tmp_path.glob("*.safetensors")))[EMBEDDING]
    check_tied_head(model)
    add(tmp_path, HEAD, embedding.clone())
    check_tied_head(model)
    add(tmp_path, HEAD, embedding + 1)
    with pytest.raises(InvalidJob, match=rf"pools\.0\.path: .* stores {HEAD} with other values than {EMBEDDING}"):
        check_tied_head(model)
    with pytest.raises(InvalidJob, match=rf"stores {HEAD} with other values"):
        load(model, "cpu", "sdpa")


def test_an_output_layer_of_its_own_is_what_an_untied_config_promises(tmp_path: Path) -> None:
    check_tied_head(held(save_tiny_model(tmp_path, tied=False)))


def test_a_tensor_without_a_place_in_the_teacher_is_refused(tmp_path: Path) -> None:
    add(save_tiny_model(tmp_path, tied=True), "model.layers.0.self_attn.o_proj.bias", torch.ones(64))
    with pytest.raises(InvalidJob, match=r"stores model\.layers\.0\.self_attn\.o_proj\.bias, for which the model"):
        load(held(tmp_path), "cpu", "sdpa")

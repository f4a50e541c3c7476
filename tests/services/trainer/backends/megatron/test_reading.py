"""Which tensors of a folder the megatron backend has to read, and which it may leave."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace.errors import InvalidJob
from millrace.megatron.architectures import read_shape
from tests.services.trainer.backends.megatron import tiny
from tests.services.trainer.backends.megatron.conftest import KINDS

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def check_whole_folder(*arguments: Any, **named: Any) -> None:
    from services.trainer.backends.megatron import published  # above, it would take each worker of pytest seconds

    published.check_whole_folder(*arguments, **named)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_of_the_architectures_that_are_built_is_read(kind: str, tmp_path: Path) -> None:
    tiny.random_model(kind).save_pretrained(tmp_path)
    check_whole_folder(tmp_path, read_shape(tmp_path), None, by_value=True)
    check_whole_folder(tmp_path, read_shape(tmp_path).as_critic(), None, by_value=True)


def test_what_would_be_lost_is_refused_by_name(tmp_path: Path) -> None:
    tiny.random_model("qwen2").save_pretrained(tmp_path)
    file, shape = tmp_path / "model.safetensors", read_shape(tmp_path)
    tensors = load_file(file)
    head = tensors[EMBEDDING].clone()
    save_file({**tensors, HEAD: head}, file)
    check_whole_folder(tmp_path, shape, None, by_value=True)
    save_file({**tensors, HEAD: head + 1}, file)
    with pytest.raises(InvalidJob, match=rf"model\.path: .*stores {HEAD} with other values than {EMBEDDING}"):
        check_whole_folder(tmp_path, shape, None, by_value=True)
    check_whole_folder(tmp_path, shape.as_critic(), None, by_value=True)
    save_file({**tensors, "model.layers.0.self_attn.o_proj.bias": torch.ones(64)}, file)
    with pytest.raises(InvalidJob, match=r"algorithm\.critic\.path: .*o_proj\.bias, for which the model of its config"):
        check_whole_folder(tmp_path, shape.as_critic(), None, by_value=False)


def test_an_epsilon_that_norms_of_latents_do_not_have_is_refused(tmp_path: Path) -> None:
    tiny.random_model("deepseek_v3").config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    for epsilon in (1e-6, 1e-5):
        file.write_text(json.dumps({**json.loads(file.read_text()), "rms_norm_eps": epsilon}))
        assert read_shape(tmp_path).norm_epsilon == epsilon
    file.write_text(json.dumps({**json.loads(file.read_text()), "rms_norm_eps": 1e-4}))
    with pytest.raises(InvalidJob, match=r"model\.path: Megatron-Core norms latents with its rms_norm_eps of 0\.0001"):
        read_shape(tmp_path)

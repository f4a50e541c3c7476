"""A model folder is looked at file by file; each thing that is missing is named."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.data.model_folder import ModelFolder, check_model_folder
from millrace.errors import InvalidJob


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def test_a_whole_folder_passes(folder: Path) -> None:
    assert check_model_folder(folder) == ModelFolder(folder, "Qwen3ForCausalLM", has_chat_template=True)


def test_a_template_in_a_file_of_its_own_counts(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert check_model_folder(folder).has_chat_template


def test_plain_texts_need_no_template(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    assert not check_model_folder(folder, messages=False).has_chat_template


def with_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model-1.safetensors").write_bytes(b"")
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


BREAKS: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: (f / "config.json").unlink(), "has no config.json"),
    (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
    (lambda f: (f / "config.json").write_text("[]"), "config.json is not a JSON object"),
    (lambda f: (f / "config.json").write_text("{}"), "names no architecture"),
    (lambda f: (f / "config.json").write_text('{"architectures": []}'), "names no architecture"),
    (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
    (lambda f: (f / "tokenizer_config.json").write_text("{}"), "the model has no chat template"),
    (lambda f: (f / "tokenizer_config.json").write_text("oops"), "tokenizer_config.json cannot be read"),
    (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
    (with_index, "names 2 files, and 1 of them are missing: model-2.safetensors"),
]


@pytest.mark.parametrize(("damage", "reason"), BREAKS, ids=[reason for _, reason in BREAKS])
def test_what_is_missing_is_named(damage: Callable[[Path], object], reason: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(InvalidJob) as refused:
        check_model_folder(folder)
    assert reason in refused.value.what
    assert refused.value.what.startswith(f'model.path: "{folder}": ')
    assert refused.value.fix


def test_no_folder_at_all(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(InvalidJob, match=r"there is no folder .*nowhere.*hf download"):
        check_model_folder(tmp_path / "nowhere")
    with pytest.raises(InvalidJob, match="is a file"):
        check_model_folder(folder / "config.json")

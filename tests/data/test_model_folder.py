"""A model folder is looked at file by file; each thing that is missing is named."""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.data.model_folder import ModelFolder, check_model_folder, check_weights_folder, text_config
from millrace.data.quantization import BlockScales, block_scales, unquantized
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


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "adapter.bin"])
def test_a_pipe_in_the_place_of_a_file_is_refused_before_anyone_waits_for_it(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(InvalidJob, match=rf"model\.path: .*: {name} is neither a file nor a folder"):
        check_model_folder(folder)


def test_a_pipe_is_not_read_by_those_who_need_the_config_alone(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(InvalidJob, match=r"config\.json cannot be read: it is not a regular file"):
        text_config(folder)


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


QUANTIZED: list[tuple[dict[str, Any], str]] = [
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized with gptq"),
    ({"quantization_config": {"quant_method": "AWQ"}}, "quantized with awq"),
    ({"quantization_config": {"load_in_4bit": True}}, "quantized with bitsandbytes"),
    (
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}},
        "compressed-tensors",
    ),
    ({"quantization_config": {"quant_method": "mxfp4"}}, "quantized with mxfp4"),
    ({"quantization_config": {"bits": 4}}, "a method that its config.json does not name"),
    ({"quantization_config": {"quant_method": "fp8"}}, "fp8 without blocks"),
    ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}}, "format e5m2"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, r"weight_block_size \[128\]"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}}, r"weight_block_size \[0, 128\]"),
    ({"quantization_config": "fp8"}, "is not an object"),
    ({"compression_config": {"format": "pack-quantized"}}, "compressed-tensors"),
    ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, r"awq \(in its text_config\)"),
]


@pytest.mark.parametrize(("entries", "reason"), QUANTIZED, ids=[reason for _, reason in QUANTIZED])
def test_quantizations_that_cannot_be_read_are_refused_by_name(
    entries: dict[str, Any], reason: str, folder: Path
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))
    for check in (check_model_folder, functools.partial(check_weights_folder, field="model.path")):
        with pytest.raises(InvalidJob, match=rf"model\.path: .*{reason}") as refused:
            check(folder)
        assert refused.value.fix


@pytest.mark.parametrize("file", ["hf_quant_config.json", "quantize_config.json"])
def test_a_quantization_that_another_file_describes_is_refused_too(file: str, folder: Path) -> None:
    (folder / file).write_text("{}")
    with pytest.raises(InvalidJob, match=r"quantized with (modelopt|gptq)"):
        check_model_folder(folder)


def test_fp8_by_blocks_passes(folder: Path) -> None:
    """The entry of DeepSeek-V3's release, and that of V3.1 with the format of its scales."""
    config = json.loads((folder / "config.json").read_text())
    stated = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    for entry in (stated, stated | {"scale_fmt": "ue8m0"}):
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
        check_model_folder(folder)
        assert block_scales({"quantization_config": entry}, folder) == BlockScales(128, 128)


def test_what_is_written_has_the_config_of_unquantized_weights() -> None:
    entry = {"quantization_config": {"quant_method": "fp8"}}
    assert unquantized({"torch_dtype": "float16", **entry}) == {"torch_dtype": "float16"}
    assert unquantized({"dtype": "float8_e4m3fn", **entry}) == {"dtype": "bfloat16"}
    assert unquantized(entry) == {"dtype": "bfloat16"}
    assert unquantized({"model_type": "qwen3"}) == {"model_type": "qwen3"}


def test_no_folder_at_all(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(InvalidJob, match=r"there is no folder .*nowhere.*owner/name"):
        check_model_folder(tmp_path / "nowhere")
    with pytest.raises(InvalidJob, match="is a file"):
        check_model_folder(folder / "config.json")

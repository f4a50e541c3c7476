"""Quantized weights in a model folder: the format that can be read, and every other one by its name. Torch-free.

The format is that of DeepSeek's releases (arXiv 2412.19437, section 3.3): a weight NAME is float8_e4m3fn, and the
tensor NAME_scale_inv has one factor for each block of it. Their product is what is trained, written and published.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.errors import InvalidJob, refused
from millrace.weights import folder_tensors

KEY = "quantization_config"
SCALES = folder_tensors.SCALES
"""Ending of the name of a tensor that has the factors of another."""
OTHER_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files in which older tools describe what they quantized, and the name of the method."""
FIX = "give the folder of the model with unquantized weights, or one in DeepSeek's FP8 format."


@dataclass(frozen=True)
class BlockScales:
    """The format of DeepSeek's FP8 weights: the size of the blocks with one factor each. The last block of a row or
    column may be smaller."""

    rows: int
    columns: int


def block_scales(config: Mapping[str, Any], folder: Path, field: str = "model.path") -> BlockScales | None:
    """The format of the quantized weights in `folder`, whose config.json is `config`; None if they are not
    quantized. Raises InvalidJob about `field`, with the name of the method, if they cannot be read."""
    stated = config.get(KEY)
    if stated is None:
        if (name := _other_method(config, folder)) is not None:
            raise _refused(field, folder, name)
        return None
    if not isinstance(stated, Mapping):
        raise refused(field, str(folder), f"{KEY} in its config.json is not an object", "download the file again.")
    name, size = _name(stated), stated.get("weight_block_size")
    if name != "fp8":
        raise _refused(field, folder, name)
    if size is None:
        raise _refused(field, folder, "fp8 without blocks (no weight_block_size)")
    if stated.get("fmt", "e4m3") != "e4m3":
        raise _refused(field, folder, f"fp8 in the format {stated['fmt']}")
    if not isinstance(size, list) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
        raise _refused(field, folder, f"fp8 with weight_block_size {size}")
    return BlockScales(*size)


def unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model with unquantized weights, in bfloat16 if `config` names no other dtype."""
    rest = {key: value for key, value in config.items() if key != KEY}
    if len(rest) == len(config):
        return rest
    key = "torch_dtype" if "torch_dtype" in rest else "dtype"
    return {**rest, key: rest[key] if rest.get(key) in ("bfloat16", "float16", "float32") else "bfloat16"}


def engine_overrides(folder: str) -> dict[str, None]:
    """The entries of a model's config that an engine has to replace so that its parameters are not quantized, as those
    that the trainer publishes are not."""
    config = json.loads((Path(folder) / "config.json").read_text())
    return {KEY: None} if config.get(KEY) is not None else {}


def _name(stated: Mapping[str, Any]) -> str:
    if method := stated.get("quant_method"):
        return str(method).lower()
    if any(key in stated for key in ("load_in_4bit", "load_in_8bit")):
        return "bitsandbytes"
    return "a method that its config.json does not name"


def _other_method(config: Mapping[str, Any], folder: Path) -> str | None:
    """The method of weights that are quantized without an entry `quantization_config`."""
    if config.get("compression_config") is not None:
        return "compressed-tensors"
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and isinstance(stated := inner.get(KEY), Mapping):
        return f"{_name(stated)} (in its text_config)"
    return next((name for file, name in OTHER_FILES.items() if (folder / file).is_file()), None)


def _refused(field: str, folder: Path, name: str) -> InvalidJob:
    return refused(field, str(folder), f"its weights are quantized with {name}, which cannot be read", FIX)

"""Names and shapes of the tensors in a model folder's safetensors, by their headers alone. Torch-free."""

import json
from pathlib import Path

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SCALES = "_scale_inv"
"""Ending of the names of a quantized tensor's scales."""
LARGEST_HEADER = 100 << 20
"""Bytes; the format allows no more."""
METADATA = "__metadata__"


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, without the scales of quantized ones; empty where there are no safetensors, or one of
    them cannot be read."""
    try:
        index = folder / INDEX
        files = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {SINGLE}
        found = {name: tuple(shape) for file in files for name, shape in _header(folder / str(file)).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {name: shape for name, shape in found.items() if name.removesuffix(SCALES) not in found.keys() - {name}}


def _header(file: Path) -> dict[str, list[int]]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > LARGEST_HEADER:
            raise ValueError(f"{file} has a header of {length} bytes")
        entries = json.loads(opened.read(length))
    return {name: entry["shape"] for name, entry in entries.items() if name != METADATA}

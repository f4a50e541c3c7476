"""PEFT folders without PEFT and without values worth reading."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Q = "model.layers.0.self_attn.q_proj"
LAYERS = {Q: (16, 32), "model.layers.1.mlp.down_proj": (24, 16)}
RANK = 8


def write_folder(
    folder: Path, layers: Mapping[str, tuple[int, int]] = LAYERS, *, rank: int = RANK, **config: Any
) -> Path:
    """A folder with an adapter of `layers`, given as inputs and outputs; `config` changes adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tree = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(tree))
    tensors = {}
    for layer, (inputs, outputs) in layers.items():
        name = f"base_model.model.{layer}"
        tensors[f"{name}.lora_A.weight"] = np.ones((rank, inputs), np.float32)
        tensors[f"{name}.lora_B.weight"] = np.zeros((outputs, rank), np.float32)
        if config.get("use_dora"):
            tensors[f"{name}.lora_magnitude_vector"] = np.ones(outputs, np.float32)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder
